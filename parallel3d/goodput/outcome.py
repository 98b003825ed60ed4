"""Results of simulated runs, and the costs that all strategies share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev


@dataclass(frozen=True, kw_only=True)
class RestartCosts:
    """Checkpoints, and a start from one."""

    interval_s: float
    """Training between two checkpoints."""
    save_s: float
    """For which a checkpoint stops training."""
    restart_s: float
    """From a failure until training goes on from the newest checkpoint."""

    @property
    def saving_share(self) -> float:
        """Share of time in which checkpoints stop training."""
        return self.save_s / (self.interval_s + self.save_s)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One simulated run; shares are of its time."""

    goodput: float
    """Work that counts, as a share of the fault-free run without checkpoints."""
    paused: float
    """All devices wait: after failures, for returns, for restarts."""
    repeated: float
    """Work that was lost."""
    num_failures: int
    num_restarts: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Several runs of one strategy that differ by their seeds."""

    goodput: float
    standard_error: float
    """Of the mean; 0 with one run."""
    paused: float
    repeated: float
    num_restarts: float
    """Mean number in a run."""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Estimate:
        goodputs = [outcome.goodput for outcome in outcomes]
        error = stdev(goodputs) / sqrt(len(goodputs)) if len(goodputs) > 1 else 0.0
        return cls(
            goodput=fmean(goodputs),
            standard_error=error,
            paused=fmean(outcome.paused for outcome in outcomes),
            repeated=fmean(outcome.repeated for outcome in outcomes),
            num_restarts=fmean(outcome.num_restarts for outcome in outcomes),
        )
