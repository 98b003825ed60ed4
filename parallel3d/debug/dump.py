"""Dumps of one step as files: one per rank, in the safetensors format, with the slabs needed to assemble the tensors.

    DIRECTORY/step-3/rank-0.safetensors     tensors "0", "1", ... and, in the metadata, the slab of each as JSON

Gradients are those of the iteration's mean loss per target token, before clipping: dumps of different layouts differ by
rounding only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallel3d.debug.slab import Slab


@dataclass(frozen=True, kw_only=True)
class RankDump:
    """One rank's part of a step."""

    step: int
    rank: int
    coordinates: str
    """Its coordinates as text."""
    ranks: tuple[int, ...]
    """All ranks of the grid that made the step."""
    losses: Mapping[int, float]
    """Sum of the token losses, in nats, of each micro-batch that ended here, by its first sequence slot."""
    num_target_tokens: int
    sequence_length: int
    tensors: Sequence[tuple[Slab, Tensor]]


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step}"


def write_dump(directory: Path, dump: RankDump) -> Path:
    """Writes one rank's file, complete or not at all; returns its path."""
    folder = step_folder(directory, dump.step)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {
        "step": dump.step,
        "rank": dump.rank,
        "coordinates": dump.coordinates,
        "ranks": dump.ranks,
        "losses": {str(slot): loss for slot, loss in dump.losses.items()},
        "num_target_tokens": dump.num_target_tokens,
        "sequence_length": dump.sequence_length,
        "slabs": [slab.to_json() for slab, _ in dump.tensors],
    }
    path, temporary = folder / f"rank-{dump.rank}.safetensors", folder / f".rank-{dump.rank}"
    tensors = {str(number): tensor.contiguous() for number, (_, tensor) in enumerate(dump.tensors)}
    save_file(tensors, temporary, metadata={"dump": json.dumps(metadata)})
    os.replace(temporary, path)
    return path


def read_dump(path: Path) -> RankDump:
    """Reads one rank's file."""
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["dump"])
        tensors = [file.get_tensor(str(number)) for number in range(len(metadata["slabs"]))]
    return RankDump(
        step=metadata["step"],
        rank=metadata["rank"],
        coordinates=metadata["coordinates"],
        ranks=tuple(metadata["ranks"]),
        losses={int(slot): loss for slot, loss in metadata["losses"].items()},
        num_target_tokens=metadata["num_target_tokens"],
        sequence_length=metadata["sequence_length"],
        tensors=[(Slab.from_json(slab), tensor) for slab, tensor in zip(metadata["slabs"], tensors)],
    )


def read_step(folder: Path) -> list[RankDump]:
    """The dumps of all ranks of a step.

    Only those of the smallest grid count. Others are left over: from a larger layout dumped into the same folder
    earlier, or from a rank that was lost just after writing.
    """
    dumps = [read_dump(path) for path in sorted(folder.glob("rank-*.safetensors"))]
    smallest = min((len(dump.ranks) for dump in dumps), default=0)
    return [dump for dump in dumps if len(dump.ranks) == smallest]
