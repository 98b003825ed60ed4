"""The strategy that starts the whole run again from its newest checkpoint after every failure. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallel3d.goodput.failure_trace import MS_PER_S, FailureTrace
from parallel3d.goodput.outcome import Outcome, RestartCosts


@dataclass(frozen=True, kw_only=True)
class RestartStrategy:
    """Any failure stops all devices; a failure while the run restarts makes the restart begin again."""

    name: str
    restart: RestartCosts

    def run(self, trace: FailureTrace) -> Outcome:
        """Simulates the trace. Work since the newest checkpoint counts at the end of the trace, not at a failure."""
        costs = self.restart
        work_ms, save_ms = round(costs.interval_s * MS_PER_S), round(costs.save_s * MS_PER_S)
        ends = np.append(trace.times_ms, trace.duration_ms)
        spans = np.diff(ends, prepend=0)
        restarting = np.minimum(spans, round(costs.restart_s * MS_PER_S))
        restarting[0] = 0
        num_saved, rest = np.divmod(spans - restarting, work_ms + save_ms)
        unsaved = np.minimum(rest, work_ms)
        done = num_saved.sum() * work_ms + unsaved[-1]
        return Outcome(
            goodput=float(done) / trace.duration_ms,
            paused=float(restarting.sum()) / trace.duration_ms,
            repeated=float(unsaved[:-1].sum()) / trace.duration_ms,
            num_failures=len(trace),
            num_restarts=len(trace),
        )
