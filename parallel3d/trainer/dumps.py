"""Dumps a step's tensors: `record_tensors` around its passes, `write_step_dump` once its entry is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.debug.dump import RankDump, write_dump
from parallel3d.debug.recorder import Recorder, name_modules, recording_hooks
from parallel3d.debug.slab import Slab, parameter_slab
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.monitor.run_folder import DUMPS
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.entry import Entry


@contextmanager
def record_tensors(rank: RankContext, batch: BatchPlan) -> Iterator[Recorder | None]:
    """Records the tensors computed within, if this step is to be dumped; else yields None."""
    asked = rank.config.debug.dump_tensors
    if batch.iteration not in asked.steps:
        yield None
        return
    recorder = Recorder(batch=batch, tp=rank.tp, names=asked.names)
    with recording_hooks(rank.chunks, recorder):
        yield recorder


def write_step_dump(rank: RankContext, entry: Entry, recorder: Recorder) -> Path:
    """Writes this rank's file. Must be called before the update, which changes the weights."""
    scale = entry.grad_scale(None)
    of_activations = scale / recorder.batch.loss_factor  # parameter gradients are divided by it in the reduction
    recorded = [
        (slab, _times(tensor, of_activations) if slab.name.endswith(".grad") else tensor)
        for slab, tensor in recorder.tensors
    ]
    parameters = [each for each in _parameters(rank, scale) if recorder.wants(each[0].name)]
    dump = RankDump(
        step=entry.iteration,
        rank=rank.rank,
        coordinates=str(rank.coordinates),
        ranks=rank.grid.ranks,
        losses=recorder.losses,
        num_target_tokens=entry.num_loss_tokens,
        sequence_length=recorder.batch.sequence_length,
        tensors=[*parameters, *recorded],
    )
    return write_dump(dump_directory(rank), dump)


def dump_directory(rank: RankContext) -> Path:
    """`debug.dump_tensors.directory`, or dumps/ in the run folder."""
    config = rank.config
    return Path(config.debug.dump_tensors.directory or Path(str(config.run.directory)) / DUMPS)


def _parameters(rank: RankContext, scale: float) -> Iterator[tuple[Slab, Tensor]]:
    """Weights and gradients in the ranges that this rank owns."""
    depths = {name: (number, depth) for number, (name, depth) in enumerate(_parameter_depths(rank))}
    for bucket in rank.optimizer.buckets:
        shardings = {parameter.sharding.name: parameter.sharding for parameter in bucket.parameters}
        span = bucket.owned.span
        for param_slot in bucket.plan.param_slots:
            start, stop = max(param_slot.offset, span.start), min(param_slot.offset + param_slot.length, span.stop)
            if start >= stop:
                continue
            number, depth = depths[param_slot.name]
            for suffix, values in (
                ("", bucket.weights[start:stop].detach().cpu().clone()),
                (".grad", _times(bucket.owned.grads[start - span.start : stop - span.start].cpu(), scale)),
            ):
                slab = parameter_slab(
                    shardings[param_slot.name],
                    suffix=suffix,
                    tp=rank.tp_shard,
                    flat_start=start - param_slot.offset,
                    depth=depth,
                    order=number - len(depths),
                )
                yield slab, values


def _times(tensor: Tensor, factor: float) -> Tensor:
    """The product, in fp32 or wider: a mean may be too small for the 16 bits that hold the sum."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor


def _parameter_depths(rank: RankContext) -> Iterator[tuple[str, int]]:
    """The stage's parameters in forward order, each with the number of its layer."""
    for named in name_modules(rank.chunks):
        for parameter in named.module.parameters(recurse=False):
            yield parameter.sharding.name, named.depth  # type: ignore[attr-defined]
