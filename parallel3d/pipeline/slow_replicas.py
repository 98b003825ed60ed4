"""Which replicas are slow, from the time that each has computed in every step. Pure.

Every rank that has seen the same times has the same `ReplicaSpeeds`, so all plan with the same slowness without a
message. What counts is the time for a unit of work against the fastest replicas of the same stage: the median of a
window, in sixteenths, and changed only if it has moved by much and not soon after a change. Otherwise every step would
be planned again.

The fastest replicas are those within a band above the fastest one, and their middle time is the measure. The fastest
time alone is the least of as many draws as the stage is wide: among 256 equal replicas with 10 % noise, others seemed
slow 32 times in 1,000 steps. The middle of the band does not depend on the width, and where most of a stage is slow it
is still that of the few that are fast.

A replica is named by its stage and its newest worker. Numbers of workers are never used again, so one that has got a
new worker is another replica, and begins at normal speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import median, median_low
from typing import Any

from parallel3d.pipeline.instructions import ReplicaId
from parallel3d.pipeline.request import NORMAL, Routes

WINDOW = 15
"""Steps of which the median counts: odd, since the mean of two middle times is a speed that no replica had."""
HYSTERESIS = 1.25
"""Ratio of two slownesses from which on the newer one is taken."""
NEAR = 1.15
"""Ratio to the fastest time up to which a replica is one of the fastest of its stage. It has to hold the noise of many
medians, and to be less than `HYSTERESIS`, so that one that enters or leaves the band does not make others slow."""
HOLD = 20
"""Steps from one change of a replica's slowness to its next."""
PATIENCE = 100
"""Steps after which a replica that is too slow for any work is taken for half as slow: only work shows its speed."""
MAX_SLOWNESS = 64 * NORMAL
"""Of a replica that hardly moves."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSpeeds:
    """The speeds of replicas that all ranks know after the same steps."""

    recent: Mapping[ReplicaId, tuple[float, ...]] = field(default_factory=dict)
    """The newest times for a unit of work, at most `WINDOW`."""
    slowness: Mapping[ReplicaId, int] = field(default_factory=dict)
    """Of slow replicas alone: their time, in 1 / `NORMAL` of the fastest ones'."""
    held: Mapping[ReplicaId, int] = field(default_factory=dict)
    """Steps for which a slowness that has just changed stays."""
    idle: Mapping[ReplicaId, int] = field(default_factory=dict)
    """Steps since slow replicas had work."""

    def after(self, unit_times: Mapping[ReplicaId, float]) -> ReplicaSpeeds:
        """Returns the speeds after one more step, in which these live replicas took this time for a unit of work.

        A replica without work has no time in it (0), and keeps what is known; one that is not named is forgotten.
        """
        recent = {
            replica: (*self.recent.get(replica, ()), time)[-WINDOW:]
            if isfinite(time) and time > 0
            else self.recent.get(replica, ())
            for replica, time in sorted(unit_times.items())
        }
        held = {replica: left - 1 for replica, left in self.held.items() if left > 1 and replica in recent}
        slowness = {replica: factor for replica, factor in self.slowness.items() if replica in recent}
        idle = {replica: self.idle.get(replica, 0) + 1 for replica in slowness if not unit_times[replica] > 0}
        for replica in [replica for replica, num_steps in idle.items() if num_steps == PATIENCE]:
            recent[replica], idle[replica] = (), 0
            slowness[replica] = max(NORMAL, slowness[replica] // 2)
        for replica, measured in _measure(recent).items():
            known = slowness.get(replica, NORMAL)
            if replica in held or max(measured, known) < HYSTERESIS * min(measured, known):
                continue
            held[replica] = HOLD
            slowness[replica] = min(MAX_SLOWNESS, round(measured))
            if measured < HYSTERESIS * NORMAL:
                del slowness[replica]
        return replace(self, recent=recent, slowness=slowness, held=held, idle=idle)

    def of_grid(self, replicas: Routes) -> Routes:
        """The slowness of these replicas for a `PlanRequest`; () if none of them is slow.

        The fastest replica of each stage is normal, whatever left since it was measured.
        """
        factors = [
            [self.slowness.get((stage, replica), NORMAL) for replica in ids] for stage, ids in enumerate(replicas)
        ]
        relative = tuple(tuple(factor * NORMAL // min(stage) for factor in stage) for stage in factors)
        return relative if any(factor > NORMAL for stage in relative for factor in stage) else ()

    def to_json(self) -> list[list[Any]]:
        """A row for each replica."""
        return [
            [*replica, list(times), self.slowness.get(replica), self.held.get(replica), self.idle.get(replica)]
            for replica, times in self.recent.items()
        ]

    @staticmethod
    def from_json(rows: list[list[Any]]) -> ReplicaSpeeds:
        known = [((stage, worker), values) for stage, worker, *values in rows]
        slowness, held, idle = (
            {replica: values[column] for replica, values in known if values[column] is not None} for column in (1, 2, 3)
        )
        recent = {replica: tuple(values[0]) for replica, values in known}
        return ReplicaSpeeds(recent=recent, slowness=slowness, held=held, idle=idle)


NORMAL_SPEEDS = ReplicaSpeeds()
"""Nothing has been measured."""


def _measure(recent: Mapping[ReplicaId, tuple[float, ...]]) -> dict[ReplicaId, float]:
    """The slowness of replicas with a whole window, against the fastest ones of their stage."""
    medians = {replica: median(times) for replica, times in recent.items() if len(times) == WINDOW}
    stages: dict[int, list[float]] = {}
    for (stage, _), time in medians.items():
        stages.setdefault(stage, []).append(time)
    normal = {stage: _middle_of_fastest(times) for stage, times in stages.items()}
    return {replica: NORMAL * time / normal[replica[0]] for replica, time in medians.items()}


def _middle_of_fastest(times: Sequence[float]) -> float:
    """The median of the times within `NEAR` of the least, the lower one of two."""
    limit = NEAR * min(times)
    return median_low(time for time in times if time <= limit)
