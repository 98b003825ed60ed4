"""Compares the peaks of a search's short runs with the plan's, stage by stage: the fullest stage decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallel3d.costs.fits import MemoryLine
from parallel3d.rehearsal.device_rows import GIB

LEAST_SIZES = 2
"""A line goes through two."""
LEAST_GIB = 1e-4
"""A sequence: the last digit that is printed."""


@dataclass(frozen=True, kw_only=True)
class TriedBatch:
    """Result of a short run with this micro-batch."""

    micro_batch_size: int
    fits: bool
    peak_bytes: int
    """Of the rank with the most; what it had reached, if it does not fit."""
    rank: int | None
    """That rank, if it is known."""
    stage_peaks: tuple[int, ...]
    """Bytes of the rank with the most, of each stage; one number of all stages where a rank's is not known."""
    tokens_per_s: float | None
    """In the last step."""


def describe_stages(
    runs: Sequence[TriedBatch], planned: Mapping[int, Sequence[int]], limit: int | None, *, on_device: bool
) -> Iterator[str]:
    """Yields each stage's fitted line, and the plan's next to it.

    runs: those that fit count. planned: bytes of each stage by micro-batch. limit: of a rank, in bytes.
    """
    fitting = [run for run in runs if run.fits]
    if len(fitting) < LEAST_SIZES:
        return
    num_stages = min(len(run.stage_peaks) for run in fitting)
    bounds = []
    for stage in range(num_stages):
        line = MemoryLine.fit([(run.micro_batch_size, run.stage_peaks[stage] / GIB) for run in fitting])
        name = f"stage {stage}" if num_stages > 1 else "the fullest rank"
        plan = MemoryLine.fit([(run.micro_batch_size, _planned(planned, run, stage, num_stages)) for run in fitting])
        peaks = [run.stage_peaks[stage] for run in fitting]
        yield f"peak of {name}: {_measured(peaks, line)}; planned {_formula(plan)}"
        if limit and line.rises(LEAST_GIB):
            bounds.append((line.largest(limit / GIB), name))
    if not on_device:
        yield "plans leave out what Python and its libraries take"
    if bounds:
        largest, name = min(bounds)
        yield f"the line of {name} fills the limit{' first,' if num_stages > 1 else ''} at a micro-batch of {largest}"


def describe_refusal(run: TriedBatch, stage: int | None, limit: int | None, log: str) -> str:
    """The error when not even `run` fits. stage: of its fullest rank."""
    what = f"a micro-batch of {run.micro_batch_size}"
    if limit and run.peak_bytes > limit:
        where = "a rank" if run.rank is None else f"rank {run.rank} (stage {stage})"
        why = f"{where} took {run.peak_bytes / GIB:.2f} GiB, the limit is {limit / GIB:.2f} GiB a rank"
    else:
        why = f"a rank was refused memory ({log})"
    return (
        f"not even {what} fits: {why}; recompute activations (parallel.recompute), shorten batch.sequence_length, or"
        " spread the model over more ranks (`parallel3d plan --devices ... --search`)"
    )


def _planned(planned: Mapping[int, Sequence[int]], run: TriedBatch, stage: int, num_stages: int) -> float:
    of_stages = planned[run.micro_batch_size]
    return (of_stages[stage] if num_stages > 1 else max(of_stages)) / GIB


def _measured(peaks: Sequence[int], line: MemoryLine) -> str:
    """The fitted line; or the largest peak, where a sequence adds no more than the peaks scatter."""
    if line.rises(LEAST_GIB):
        return f"{_formula(line)} (R^2 {line.r_squared:.4f})"
    return f"{max(peaks) / GIB:.2f} GiB, and a sequence adds too little to be measured beside their scatter"


def _formula(line: MemoryLine) -> str:
    return f"{line.overhead:.2f} GiB + {line.per_item:.4f} GiB a sequence"
