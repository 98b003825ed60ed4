"""Plans the grids after each first loss ahead, while the rank waits for others.

Planning a large damaged grid takes about a second, longer than the rest of a recovery. So a thread simulates one loss
after the other, and stands still whenever the rank's own thread does not wait: at every instant of a simulation it
looks whether it may go on. Small grids are planned in milliseconds when they are needed, and never here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

from parallel3d.config.schema import Config
from parallel3d.errors import GenerationEnded
from parallel3d.parallel.abort import POLL_S, AbortToken, Wait
from parallel3d.parallel.grid import Grid
from parallel3d.pipeline.planner import Plan
from parallel3d.trainer.plans import PlanKey, plan_schedule

MIN_COMPUTES = 1 << 13
"""Micro-batches x virtual stages from which on a plan takes longer than 0.1 s."""
MAX_COMPUTES = 1 << 21
"""Computes of all plans that a rank keeps: about 200 MB."""
SWITCH_S = 0.0002
"""How long Python lets the planning thread run on when the rank's wait has ended."""


class PlannedLosses:
    """The plans that one rank has made ahead."""

    def __init__(self, config: Config) -> None:
        self.plans: dict[PlanKey, Plan] = {}
        self._config = config
        self._interval_s = sys.getswitchinterval()

    def begin(self, grid: Grid, num_micro_batches: int, token: AbortToken) -> threading.Thread | None:
        """Begins with the losses that `grid` can have, for as long as the generation of `token` lives; returns the
        thread, or None if they are not worth it."""
        self.plans = plans = {}
        num_computes = num_micro_batches * grid.pp_size * self._config.parallel.virtual_stages
        if num_computes < MIN_COMPUTES:
            return None
        may_plan, on_wait = threading.Event(), token.on_wait

        def watch(wait: Wait | None) -> None:
            on_wait(wait)
            if wait is None:
                may_plan.clear()
            else:
                may_plan.set()

        def pause() -> None:
            token.check()
            while not may_plan.wait(POLL_S):
                token.check()

        def make_plans() -> None:
            sys.setswitchinterval(SWITCH_S)
            try:
                for smaller in list(first_losses(grid))[: MAX_COMPUTES // num_computes]:
                    plan = plan_schedule(self._config, smaller, num_micro_batches, pause=pause)
                    pause()
                    assert plan.digest  # computes it, too
                    plans[smaller.replicas, num_micro_batches] = plan
            except GenerationEnded:
                pass
            finally:
                sys.setswitchinterval(self._interval_s)
                token.on_wait = on_wait

        token.on_wait = watch
        thread = threading.Thread(target=make_plans, daemon=True, name="plan-losses")
        thread.start()
        return thread


def first_losses(grid: Grid) -> Iterator[Grid]:
    """The grids after the loss of any one replica that a run survives."""
    for stage, replicas in enumerate(grid.replicas):
        for replica in replicas:
            smaller, _ = grid.without(grid.tp_ranks((stage, replica))[:1])
            if not smaller.stages_lost():
                yield smaller
