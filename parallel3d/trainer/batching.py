"""The batch of an iteration, as a function of the configuration and the state. Pure."""

from __future__ import annotations

from dataclasses import replace

from parallel3d.config.schema import Config
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.size_schedule import BatchShape
from parallel3d.trainer.state import TrainState


def next_batch(config: Config, state: TrainState) -> BatchPlan:
    """The batch of the iteration after `state`: its number, the shape that the warmups have reached, its loss scale."""
    batch = plan_batch(config, state.iteration + 1, state.shape)
    return replace(batch, loss_factor=state.loss_scale.factor)


def plan_batch(config: Config, iteration: int, shape: BatchShape | None = None) -> BatchPlan:
    """The batch of one iteration; `shape` None means full size, as after all warmups."""
    batch = config.batch
    assert batch.num_micro_batches is not None and batch.micro_batch_size is not None
    return BatchPlan(
        seed=config.run.seed,
        iteration=iteration,
        num_micro_batches=shape.num_sequences // batch.micro_batch_size if shape else batch.num_micro_batches,
        micro_batch_size=batch.micro_batch_size,
        sequence_length=shape.sequence_length if shape else batch.sequence_length,
        masks_documents=config.data.document_mask,
        masks_targets=config.data.chat is not None,
    )
