"""Searches for a sequence-length warmup by short runs ("Sequence Length Warmup", Li et al. 2022, section 4). Pure.

    1  start with a length of 8 and a duration T of a few multiples of the learning rate's warmup
    2  increase the first length until the validation perplexity does not fluctuate at the very beginning
    3  find, by bisection, the longest T without fluctuation within the first few multiples of that warmup

A fluctuation is a perplexity of more than 1.3 times the best one before. The search uses validation losses only, from
the beginning of each run. It assumes that a longer first length and a shorter duration are more stable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    """A short run: the first `num_steps` of a linear warmup from length `start` over `duration` steps."""

    start: int
    duration: int
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class ShortRunEvaluation:
    """A validation loss, in nats; None if not finite, or if the run diverged before it."""

    step: int
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Fluctuation:
    """An evaluation too far above the best one before."""

    step: int
    ratio: float
    """Its perplexity over the best one before; infinite for a run that diverged."""

    def __str__(self) -> str:
        size = f"{self.ratio:.2f} x the best" if isfinite(self.ratio) else "not finite"
        return f"fluctuates at step {self.step}: perplexity {size}"


def first_fluctuation(evaluations: Sequence[ShortRunEvaluation], tolerance: float) -> Fluctuation | None:
    """The first perplexity above `tolerance` times the best one before; None if there is none."""
    best = inf
    for evaluation in evaluations:
        loss = inf if evaluation.loss is None else evaluation.loss
        if not isfinite(loss) or loss - best > log(tolerance):
            return Fluctuation(step=evaluation.step, ratio=exp(loss - best) if isfinite(loss) else inf)
        best = min(best, loss)
    return None


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The candidates, and the limit of stability."""

    starts: Sequence[int]
    """First lengths, increasing."""
    durations: Sequence[int]
    """Durations, increasing; step 1 uses the first."""
    start_run_steps: int
    """Number of steps of a run that tries a first length."""
    duration_run_steps: int
    """Number of steps of a run that tries a duration."""
    tolerance: float = 1.3

    @property
    def max_short_runs(self) -> int:
        return len(self.starts) + len(self.durations).bit_length()


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The warmup found, and why the search ended; None where every candidate fluctuates."""

    start: int | None
    duration: int | None
    reason: str


TrainShortRun = Callable[[ShortRun], Sequence[ShortRunEvaluation]]
"""Runs a short run and returns its evaluations in order."""

ReportShortRun = Callable[[ShortRun, Fluctuation | None], None]


def search_warmup(
    search: SearchSpace, train: TrainShortRun, report: ReportShortRun = lambda short_run, fluctuation: None
) -> SearchResult:
    """Finds the longest stable duration of the smallest stable first length, within `search.max_short_runs` runs."""

    def is_stable(short_run: ShortRun) -> bool:
        fluctuation = first_fluctuation(train(short_run), search.tolerance)
        report(short_run, fluctuation)
        return fluctuation is None

    def is_stable_start(start: int) -> bool:
        return is_stable(ShortRun(start=start, duration=search.durations[0], num_steps=search.start_run_steps))

    start = next(filter(is_stable_start, search.starts), None)
    if start is None:
        return SearchResult(start=None, duration=None, reason="every first length fluctuates at the very beginning")
    stable, unstable = 0, len(search.durations) + 1  # positions in durations, from 1; bisection between them
    while unstable - stable > 1:
        middle = (stable + unstable) // 2
        if is_stable(ShortRun(start=start, duration=search.durations[middle - 1], num_steps=search.duration_run_steps)):
            stable = middle
        else:
            unstable = middle
    if stable == 0:
        return SearchResult(start=start, duration=None, reason="even the shortest duration fluctuates")
    is_last = stable == len(search.durations)
    reason = "the longest candidate" if is_last else f"{search.durations[stable]} fluctuates"
    return SearchResult(start=start, duration=search.durations[stable - 1], reason=reason)
