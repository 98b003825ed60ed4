"""The estimate for a configuration: rehearses one replica, and times it on devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel3d.config.derived import flops_per_token, tokens_per_step
from parallel3d.config.schema import Config
from parallel3d.rehearsal.device_rows import DeviceRow
from parallel3d.rehearsal.estimate_table import describe_estimates
from parallel3d.rehearsal.ideal_counts import ideal_phases
from parallel3d.rehearsal.meta_rank import LayeredRehearsal, Rehearsal
from parallel3d.rehearsal.roofline import StepEstimate, estimate_step
from parallel3d.trainer.build import MakeStage


def one_replica(config: Config) -> Config:
    """The configuration of a run with one of the replicas alone, and its part of the batch."""
    batch, num_replicas = config.batch, config.parallel.dp_size or 1
    assert batch.global_batch_size is not None and batch.num_micro_batches is not None, "needs a resolved configuration"
    size, count = max(1, batch.global_batch_size // num_replicas), max(1, batch.num_micro_batches // num_replicas)
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"dp_size": 1}),
            "batch": batch.model_copy(update={"global_batch_size": size, "num_micro_batches": count}),
        }
    )


def estimate_on(config: Config, rehearsal: Rehearsal, row: DeviceRow) -> StepEstimate:
    """The estimate for one rank; with tensor parallelism, each does a part of the FLOPs for all of the tokens."""
    num_tokens = tokens_per_step(config)
    flops = num_tokens * flops_per_token(config.model, config.batch.sequence_length) / config.parallel.tp_size
    return estimate_step(
        rehearsal.phases, row, num_tokens=num_tokens, model_flops=flops, peak_bytes=rehearsal.peak_bytes
    )


def describe_on_devices(
    config: Config, rehearsal: Rehearsal, rows: Sequence[DeviceRow]
) -> tuple[list[StepEstimate], Iterator[str]]:
    """The estimates on several devices, and their table."""
    estimates = [estimate_on(config, rehearsal, row) for row in rows]
    ideal = ideal_phases(config, num_elements=rehearsal.num_elements, num_buckets=rehearsal.num_buckets)
    return estimates, describe_estimates(estimates, ideal)


def describe_config(config: Config, make_stage: MakeStage, rows: Sequence[DeviceRow]) -> Iterator[str]:
    """The table for one replica of a run, which keeps all of its optimizer state; UserError with several stages."""
    replica = one_replica(config)
    yield from describe_on_devices(replica, LayeredRehearsal.of(replica, make_stage).whole, rows)[1]
