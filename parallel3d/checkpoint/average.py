"""The mean of the weights of several checkpoints, as a checkpoint of weights alone.

Each element is summed in fp64, divided, and rounded once to fp32. Neither the order of the checkpoints nor their
layouts change a bit, and checkpoints of different precision can be mixed. The work goes by blocks of rows, so it takes
the memory of a few blocks, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.disk import Disk, refuse_existing
from parallel3d.checkpoint.index import WEIGHT, Index
from parallel3d.checkpoint.read import CheckpointReader
from parallel3d.checkpoint.tensor_chunks import IntTuple, row_blocks
from parallel3d.checkpoint.weights import write_weights
from parallel3d.checkpoint.write import bytes_of
from parallel3d.config.same_model import NON_WEIGHT_FIELDS
from parallel3d.errors import CheckpointError

BLOCK_ELEMENTS = 4 << 20


def average(folders: Sequence[Path], target: Path, *, disk: Disk | None = None) -> Index:
    """Writes the mean of the checkpoints' weights to the folder `target`, which must not exist; it appears whole
    or not at all. Every byte of the checkpoints is verified first.

    Raises CheckpointError for damaged checkpoints and for different models; OSError.
    """
    refuse_existing(target)
    readers = [CheckpointReader(folder, verify_checkpoint(folder)) for folder in folders]
    if problem := next(_differences(readers), ""):
        raise CheckpointError(problem)
    newest = max(readers, key=lambda reader: reader.index.step)
    shapes = {name: tensor.shape for name, tensor in newest.index.tensors.items()}
    blocks = ((name, *block) for name, shape in shapes.items() for block in row_blocks(shape, BLOCK_ELEMENTS))
    averaged = {"state": {}, "averaged": tuple(str(folder) for folder in folders)}
    return write_weights(
        target,
        {name: ("F32", shape) for name, shape in shapes.items()},
        (bytes_of(mean_of(readers, *block)) for block in blocks),
        facts=newest.index.facts.model_copy(update=averaged),
        step=newest.index.step,
        files=newest.side_files(),
        disk=disk,
    )


@torch.no_grad()
def mean_of(readers: Sequence[CheckpointReader], tensor: str, start: IntTuple, shape: IntTuple) -> Tensor:
    """Returns the mean of a rectangle in fp32, summed in fp64."""
    total = torch.zeros(shape, dtype=torch.float64)
    for reader in readers:
        total += reader.read(WEIGHT, tensor, start, shape)
    return (total / len(readers)).float()


def _differences(readers: Sequence[CheckpointReader]) -> Iterator[str]:
    """Yields sentences on what makes them checkpoints of different models."""
    first, *others = readers
    for other in others:
        was, now = (reader.index.facts.config.get("model", {}) for reader in (first, other))
        for field in sorted((was.keys() | now.keys()) - set(NON_WEIGHT_FIELDS)):
            if was.get(field) != now.get(field):
                here, there = (f"{side.get(field)!r}" for side in (was, now))
                yield f"different models: model.{field} is {here} in {first.folder}, {there} in {other.folder}"
        ours, theirs = first.index.tensors, other.index.tensors
        for name in sorted(ours.keys() | theirs.keys()):
            here, there = (f"{side[name].shape}" if name in side else "not there" for side in (ours, theirs))
            if here != there:
                yield f"different models: {name} is {here} in {first.folder}, {there} in {other.folder}"
