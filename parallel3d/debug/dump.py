"""Dumps of one step as files: one for each rank, in the safetensors format, with what it takes to put them together.

    DIRECTORY/step-3/rank-0.safetensors     tensors "0", "1", ... and, in the metadata, the slab of each as JSON

Gradients are those of the mean loss of a target token over the whole iteration, before clipping: a layout changes none
of what is in a dump but the last digits.
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
    """Its coordinates, for people."""
    ranks: tuple[int, ...]
    """All ranks of the grid that made the step."""
    losses: Mapping[int, float]
    """By the first sequence slot of each micro-batch that ended here: the sum of its token losses, in nats."""
    num_target_tokens: int
    sequence_length: int
    tensors: Sequence[tuple[Slab, Tensor]]


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step}"


def write_dump(directory: Path, dump: RankDump) -> Path:
    """Writes one rank's file in one go; returns its path."""
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
    """All ranks' files of a step.

    Those of ranks that are not in the smallest grid are left over: from a larger layout that was dumped into the same
    folder before, or from a rank that was lost just after it had written.
    """
    dumps = [read_dump(path) for path in sorted(folder.glob("rank-*.safetensors"))]
    smallest = min((len(dump.ranks) for dump in dumps), default=0)
    return [dump for dump in dumps if len(dump.ranks) == smallest]
