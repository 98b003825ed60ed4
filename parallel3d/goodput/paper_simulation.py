"""FlexiTrain's simulations of a month in intervals of 10 minutes (section 2.1.1), many months at once. Pure.

The paper leaves rules open; those that decide are parameters here. Every month is drawn from the same seeded generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

MINUTES_PER_INTERVAL = 10
SEED = 2024


@dataclass(frozen=True, kw_only=True)
class PaperCluster:
    """The cluster of FlexiTrain's section 2.1; times are in intervals of 10 minutes."""

    num_devices: int = 10_000
    failure_probability: float = 1.5e-5 / 6
    """Of one device in one interval: 1.5e-5 an hour."""
    num_ranks: int = 64
    """Data-parallel ranks, of 156 devices each."""
    num_intervals: int = 30 * 24 * 6
    checkpoint: int = 18
    """Between two checkpoints: 3 hours."""
    reload: int = 2
    """20 minutes."""

    @property
    def any_failure(self) -> float:
        """Probability that some device fails within an interval."""
        return 1 - (1 - self.failure_probability) ** self.num_devices


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and standard deviation of one month's result, in percent, over simulated months."""

    mean: float
    sd: float

    @classmethod
    def of(cls, shares: npt.NDArray[np.float64]) -> Spread:
        return cls(mean=100 * float(shares.mean()), sd=100 * float(shares.std(ddof=1)))

    def z_score(self, published: float) -> float:
        """Distance of a published month from the mean, in standard deviations of one month."""
        return (published - self.mean) / self.sd


# --- the rest goes on -------------------------------------------------------------------------------------------------


def simulate_rank_drop(
    cluster: PaperCluster, *, num_months: int, out: int | None = None, rank_share: float | None = None
) -> Spread:
    """Throughput if a failure takes its data-parallel rank until the next checkpoint, or for `out` intervals.

    The interval of the failure is lost, too. `rank_share` is the share of the cluster that one failure takes, if it is
    not a rank's.
    """
    rng = np.random.default_rng(SEED)
    failures = rng.binomial(cluster.num_devices, cluster.failure_probability, (num_months, cluster.num_intervals))
    months, begins = np.repeat(np.indices(failures.shape).reshape(2, -1), failures.ravel(), axis=1)
    ranks = rng.integers(cluster.num_ranks, size=len(months))
    ends = begins + out if out is not None else (begins // cluster.checkpoint + 1) * cluster.checkpoint
    order = np.lexsort((begins, ranks, months))
    months, ranks, begins, ends = months[order], ranks[order], begins[order], ends[order]
    is_same = (months[:-1] == months[1:]) & (ranks[:-1] == ranks[1:])
    ends[:-1] = np.where(is_same, np.minimum(ends[:-1], begins[1:]), ends[:-1])  # out is out: counted once
    lost = np.bincount(months, weights=np.minimum(ends, cluster.num_intervals) - begins, minlength=num_months)
    share = 1 / cluster.num_ranks if rank_share is None else rank_share
    return Spread.of(1 - lost * share / cluster.num_intervals)


# --- checkpoint and restart -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointedMonths:
    """Throughput, and the mean time from a checkpoint to a failure, in minutes."""

    throughput: Spread
    failure_minutes: float


def simulate_checkpointing(
    cluster: PaperCluster,
    *,
    num_months: int,
    failing_interval: Literal["lost", "counted"] = "lost",
    resumes_at_checkpoint: bool = False,
) -> CheckpointedMonths:
    """Throughput if a failure stops everything until the reload is done and the work since the checkpoint is repeated.

    That time passes without further failures, as in the paper's published program: t += reload + since_checkpoint. The
    interval of the failure is `lost`, or `counted` as work and followed by the lost time. The time until the next
    checkpoint runs from the last one, or, if the run `resumes_at_checkpoint`, from the end of the lost time.
    """
    rng = np.random.default_rng(SEED)
    now, last, done = (np.zeros(num_months, np.int64) for _ in range(3))
    since_sum = num_failures = 0
    counted = int(failing_interval == "counted")
    while (now < cluster.num_intervals).any():
        gap = rng.geometric(cluster.any_failure, num_months) - 1  # intervals of work before the one that fails
        fails = now + gap
        done += np.clip(np.minimum(fails + counted, cluster.num_intervals) - now, 0, None)
        last = np.where(now - last >= cluster.checkpoint, now, last)
        last += (fails - last) // cluster.checkpoint * cluster.checkpoint
        since = fails - last
        is_within = fails < cluster.num_intervals
        since_sum += int(since[is_within].sum())
        num_failures += int(is_within.sum())
        now = fails + cluster.reload + since
        if resumes_at_checkpoint:
            last = now.copy()
        now += counted
    return CheckpointedMonths(
        throughput=Spread.of(done / cluster.num_intervals),
        failure_minutes=MINUTES_PER_INTERVAL * since_sum / num_failures,
    )
