"""Failures of a cluster over some time, drawn once and given to every strategy alike. Pure.

Times are integer milliseconds and draws are seeded: the same trace on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MS_PER_S = 1000
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class FailureTrace:
    """When a device fails, and which replica of a stage it belongs to."""

    duration_ms: int
    times_ms: npt.NDArray[np.int64]
    """Ascending, in [0, duration_ms)."""
    replicas: npt.NDArray[np.int64]
    """stage x (replicas of a stage) + number of the replica."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields (time in ms, replica)."""
        return zip(self.times_ms.tolist(), self.replicas.tolist())

    def __len__(self) -> int:
        return len(self.times_ms)


def draw_trace(*, failures_per_hour: float, num_replicas: int, duration_s: int, seed: tuple[int, ...]) -> FailureTrace:
    """Draws a Poisson process of failures, each of which hits one of all replicas of all stages."""
    rng = np.random.default_rng(seed)
    duration_ms = duration_s * MS_PER_S
    num_failures = int(rng.poisson(failures_per_hour * duration_s / SECONDS_PER_HOUR))
    return FailureTrace(
        duration_ms=duration_ms,
        times_ms=np.sort(rng.integers(duration_ms, size=num_failures)),
        replicas=rng.integers(num_replicas, size=num_failures),
    )
