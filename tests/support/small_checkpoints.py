"""Small checkpoints without a model: two ranks, two tensors, values that say which step they are of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from parallel3d.checkpoint.directory import CheckpointDirectory, NewestCheckpoint, verify_checkpoint
from parallel3d.checkpoint.disk import Disk
from parallel3d.checkpoint.index import Index, RunFacts
from parallel3d.checkpoint.read import CheckpointReader
from parallel3d.checkpoint.snapshot import BucketRange, Snapshot
from parallel3d.checkpoint.tensor_chunks import TensorChunk
from parallel3d.checkpoint.write import publish, write_rank_files

RANKS = (0, 1)
FILES = {"tokenizer.model": b"pieces"}
SHAPES = {"a.weight": (6, 5), "b.bias": (7,)}


def snapshot(rank: int, step: int) -> Snapshot:
    """Rank 0 has the upper rows of a; rank 1 the lower ones, and b."""
    pieces = [TensorChunk(tensor="a.weight", start=(3 * rank, 0), shape=(3, 5), offset=10, strides=(5, 1))]
    if rank == 1:
        pieces.append(TensorChunk(tensor="b.bias", start=(0,), shape=(7,), offset=25, strides=(1,)))
    kinds = ("weight", "moment1", "moment2")
    states = {kind: torch.arange(25.0) + 1000 * step + 100 * row + 50 * rank for row, kind in enumerate(kinds)}
    shapes = {tensor_chunk.tensor: SHAPES[tensor_chunk.tensor] for tensor_chunk in pieces}
    return Snapshot(ranges=(BucketRange(start=10, pieces=tuple(pieces), states=states),), shapes=shapes)


def save(
    directory: Path,
    step: int,
    *,
    disk: Disk | None = None,
    keep_last: int = 2,
    keep_every: int | None = None,
    weights_only: bool = False,
    generation: int = 0,
    change: Callable[[Snapshot], None] = lambda snapshot: None,
    **facts,
) -> Path:
    """Does the work of all ranks of a run, one after the other."""
    checkpoint_dir = CheckpointDirectory(directory, disk)
    partial = checkpoint_dir.partial_path(step, generation)
    checkpoint_dir.remove_leftovers(keep=partial, old=checkpoint_dir.leftovers())  # as a process that starts now
    for rank in RANKS:
        taken = snapshot(rank, step)
        change(taken)
        write_rank_files(checkpoint_dir.disk, partial, rank, taken)
    everything = RunFacts(state={"iteration": step}, config={}, **facts)
    publish(checkpoint_dir, partial, step, RANKS, everything, FILES)
    checkpoint_dir.prune(keep_last=keep_last, keep_every=keep_every, weights_only=weights_only)
    return checkpoint_dir.path_of(step)


def assert_is(found: NewestCheckpoint, step: int) -> None:
    """The checkpoint is the one of `step`, to the last value."""
    assert found.path is not None and found.index is not None and found.index.step == step
    assert_holds(found.path, found.index, ("weight", "moment1", "moment2"))


def assert_weights(folder: Path, step: int) -> Index:
    """Every byte is as it was written, the weights are those of `step`; the index."""
    index = verify_checkpoint(folder)
    assert index.step == step
    assert_holds(folder, index, ("weight",))
    return index


def assert_holds(folder: Path, index: Index, kinds: tuple[str, ...]) -> None:
    """These kinds are those of the index's step, to the last value, and the files beside them."""
    for name, data in FILES.items():
        assert (folder / name).read_bytes() == data and name in {file.name for file in index.files}
    reader, step = CheckpointReader(folder, index), index.step
    for kind, name in enumerate(kinds):
        a = reader.read(name, "a.weight", (0, 0), (6, 5))
        rows = [(torch.arange(15.0) + 1000 * step + 100 * kind + 50 * rank).view(3, 5) for rank in RANKS]
        assert torch.equal(a, torch.cat(rows))
        b = reader.read(name, "b.bias", (2,), (3,))
        assert torch.equal(b, torch.arange(17.0, 20.0) + 1000 * step + 100 * kind + 50)
