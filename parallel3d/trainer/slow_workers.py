"""The records of slow replicas, and of slow ranks within tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parallel3d.parallel.grid import Grid
from parallel3d.pipeline.instructions import ReplicaId
from parallel3d.pipeline.planner import Plan
from parallel3d.pipeline.request import NORMAL
from parallel3d.pipeline.slow_plan import true_makespan
from parallel3d.pipeline.slow_replicas import NORMAL_SPEEDS
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.hopeless_replicas import find_hopeless, settled_slow_replicas
from parallel3d.trainer.plans import costs_of_passes
from parallel3d.trainer.step import StepReport


class SlowWorkers:
    """Follows the speeds that `rank` knows, and makes records of their changes while it is the leader."""

    def __init__(self, rank: RankContext):
        self._rank = rank
        self._known: dict[ReplicaId, int] = {}
        """The slowness of replicas at the last look."""
        self._changed_in = 0
        """The last step that changed it."""
        self._within = NORMAL_SPEEDS
        """Of ranks against those of their replica."""
        self._judged: object = None
        """What the last decision about hopeless replicas rested on."""

    def begin_generation(self, last_reported_step: int) -> Iterator[dict[str, Any]]:
        """Yields what the former leader may have died before reporting."""
        self._judged = None
        self._look()
        if self._changed_in > last_reported_step:
            yield self._record(None)

    def end_step(self, report: StepReport) -> Iterator[dict[str, Any]]:
        """Yields the records of a change that this step has made."""
        if not self._rank.config.elastic.balance:
            return
        self._look()
        if self._changed_in == report.entry.iteration and self._rank.is_leader:
            yield self._record(report.plan)
        if self._rank.grid.tp_size > 1 and not self._rank.clock.is_of_device:  # or one that waits for the slow is named
            yield from self._slow_ranks(report)
        if self._rank.is_leader and self._rank.config.elastic.drain_slow and self._rank.config.elastic.enabled:
            yield from self._hopeless()

    def _look(self) -> None:
        """Finds out whether other replicas of the grid are slow, or slow in another way, than at the last look."""
        state, grid = self._rank.state, self._rank.grid
        if {key: factor for key, factor in self._known.items() if grid.holds(key[1])} != self._slowness:
            self._changed_in = state.iteration
        self._known = self._slowness

    @property
    def _slowness(self) -> dict[ReplicaId, int]:
        """The slowness of the grid's replicas."""
        slowness = self._rank.state.speeds.slowness
        return {key: factor for key, factor in sorted(slowness.items()) if self._rank.grid.holds(key[1])}

    def _record(self, former: Plan | None) -> dict[str, Any]:
        """The record of the newest change; `former` is the plan before it, on the same grid."""
        rank = self._rank
        plan = rank.plans.next(rank.state)
        slow = {describe_replica(rank.grid, worker): factor / NORMAL for (_, worker), factor in self._known.items()}
        share = None if former is None or len(former.routes) != len(plan.routes) else self._share_of(plan, former)
        return {
            "kind": "balance",
            "step": rank.state.iteration,
            "text": f"step {rank.state.iteration}: {describe_slow(slow)}{describe_share(share)}",
            "slow": slow,
            "step_share": share,
            "plan": plan.reason,
        }

    def _hopeless(self) -> Iterator[dict[str, Any]]:
        """The request that a replica leaves, once for the same speeds on the same grid."""
        rank = self._rank
        settled = settled_slow_replicas(rank.plans, rank.state)
        if not settled or (judged := (settled, rank.plans.slowness(rank.state))) == self._judged:
            return
        self._judged = judged
        if (found := find_hopeless(rank.plans, rank.state)) is not None:
            name = describe_replica(rank.grid, found.ranks[0])
            yield {
                "kind": "drain_slow",
                "step": rank.state.iteration,
                "text": f"{name} takes {found.factor:.1f} x as long as the fastest of its stage; without it, steps are "
                f"planned to take {found.step_share:.2f} x as long",
                "ranks": list(found.ranks),
                "slow": found.factor,
                "step_share": found.step_share,
            }

    def _share_of(self, plan: Plan, former: Plan) -> float:
        """The time of a step, as a share of what it would be with the plan before."""
        costs, slowness = costs_of_passes(self._rank.config), self._rank.plans.slowness(self._rank.state)
        request = replace(plan.request, costs=costs, slowness=slowness)
        return true_makespan(plan, request) / true_makespan(former, request)

    def _slow_ranks(self, report: StepReport) -> Iterator[dict[str, Any]]:
        """A notice for each rank that has become slow within its replica, or is no longer."""
        grid, before = self._rank.grid, self._within.slowness
        replicas = {rank: max(grid.tp_ranks(grid.coordinates(rank).replica)) for rank in grid.ranks}
        self._within = self._within.after(
            {(replicas[rank], rank): seconds for rank, seconds in zip(grid.ranks, report.telemetry.own_s)}
        )
        for (_, rank), factor in sorted(self._within.slowness.items()):
            if before.get((replicas[rank], rank)) != factor:
                text = (
                    f"step {report.entry.iteration}: rank {rank} ({grid.coordinates(rank)}) slows its replica down: it "
                    f"computes {factor / NORMAL:.1f} x as long as the fastest of {grid.tp_size} tensor-parallel ranks"
                )
                yield {"kind": "notice", "text": text}


def describe_replica(grid: Grid, worker: int) -> str:
    """For example "pp0 dp3 (rank 3)", or "pp0 dp1 (ranks 2, 3)"."""
    coordinates = grid.coordinates(worker)
    ranks = sorted(grid.tp_ranks(coordinates.replica))
    names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"pp{coordinates.pp} dp{coordinates.dp} ({names})"


def describe_slow(slow: dict[str, float]) -> str:
    if not slow:
        return "no replica is slow any more"
    times = ", ".join(f"{name} {factor:.1f} x" for name, factor in slow.items())
    return f"slow replicas, by the time of the fastest of their stage: {times}"


def describe_share(share: float | None) -> str:
    return "" if share is None else f"; steps are planned to take {share:.2f} x as long as with the routes before"
