"""The planner's input: everything that a plan depends on, validated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.chunk_layout import ChunkLayout
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.schedules import SCHEDULES, find_schedule
from parallel3d.pipeline.schedules.schedule import Schedule

Routing = Literal["reroute", "balance", "drop"]
Routes = tuple[tuple[int, ...], ...]
"""routes[micro-batch][stage] = id of the replica."""
NORMAL = 16
"""The time that a replica takes if it is not slow; slow ones take more of these units."""
Pause = Callable[[], None]
"""Called at every instant of a simulation. It may wait, or raise to give the plan up."""


def no_pause() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything that a plan depends on: ranks with the same request make the same plan."""

    replicas: tuple[tuple[int, ...], ...]
    """For each stage the ids of its live replicas, in any order and with gaps."""
    num_micro_batches: int
    schedule: str
    """A name in `SCHEDULES`, or that of the user's own."""
    costs: StageCosts
    """Costs of each virtual stage."""
    virtual_stages: int = 1
    """Chunks of layers on each stage; the schedule lays them out. A micro-batch passes the same replica of a stage with
    each chunk."""
    has_backward: bool = True
    """False: forward passes alone, for evaluation."""
    slots: int = 3
    """Messages that an ordered pair of replicas can hold unread."""
    routing: Routing = "reroute"
    """reroute: a micro-batch leaves its home replica only where it is lost; balance: also where others of the stage
    finish it sooner; drop: replica ids that are not alive at every stage get no work."""
    slowness: Routes = ()
    """For each stage the time that its replicas take, in the order of `replicas`: `NORMAL`, or more. Empty: all are
    normal. Otherwise times are in 1 / `NORMAL` of the costs' units."""
    split_backward: bool = False
    """Compute the gradients of inputs and of weights apart; some schedules always do."""
    extra_in_flight: int = 0
    """Micro-batches (of one chunk) that a replica may hold above the schedule's own limit."""

    def __post_init__(self) -> None:
        num_stages = len(self.replicas)
        num_costs = num_stages * self.virtual_stages
        is_known = self.schedule in SCHEDULES or ":" in self.schedule
        schedule = find_schedule(self.schedule) if is_known else None
        broken = schedule and schedule.find_broken_rule(num_stages, self.virtual_stages)
        checks = [
            (num_stages < 1, "no stages"),
            (not all(self.replicas), f"a stage has no replica: {self.replicas}"),
            (any(len(set(ids)) < len(ids) for ids in self.replicas), f"a replica id occurs twice: {self.replicas}"),
            (self.num_micro_batches < 1, f"{self.num_micro_batches} micro-batches"),
            (schedule is None, f"unknown schedule {self.schedule!r}"),
            (broken is not None, f"{self.virtual_stages} virtual stages: {broken.rule}" if broken else ""),
            (self.costs.num_stages != num_costs, f"costs of {self.costs.num_stages} stages, {num_costs} stages"),
            (self.slots < 1, f"{self.slots} slots"),
            (self.routing == "drop" and not self.whole_pipelines, f"no id is alive at every stage: {self.replicas}"),
            (
                bool(self.slowness) and [*map(len, self.slowness)] != [*map(len, self.replicas)],
                f"slowness {self.slowness} of replicas {self.replicas}",
            ),
            (min(map(min, self.slowness), default=NORMAL) < NORMAL, f"slowness {self.slowness}: below {NORMAL}"),
            (self.split_backward and not self.has_backward, "no backward pass to split"),
            (self.extra_in_flight < 0, f"extra_in_flight {self.extra_in_flight}"),
        ]
        if reasons := [reason for is_broken, reason in checks if is_broken]:
            raise ScheduleError("no plan can be made: " + "; ".join(reasons))

    @property
    def rules(self) -> Schedule:
        return find_schedule(self.schedule)

    @property
    def name(self) -> str:
        """The schedule's name, or "forward" without a backward pass."""
        return self.schedule if self.has_backward else "forward"

    @property
    def num_stages(self) -> int:
        return len(self.replicas)

    @cached_property
    def layout(self) -> ChunkLayout:
        return self.rules.chunk_layout(self.num_stages, self.virtual_stages)

    @property
    def splits(self) -> bool:
        return self.has_backward and (self.split_backward or self.rules.splits_backward)

    @property
    def limits_in_flight(self) -> bool:
        """Whether extra_in_flight has an effect."""
        return self.has_backward and self.rules.limits_in_flight

    @property
    def time_scale(self) -> int:
        """Units of simulated time in a unit of the costs."""
        return NORMAL if self.slowness else 1

    @cached_property
    def time_factors(self) -> dict[tuple[int, int], int]:
        """By (stage, replica), the simulated time of a unit of its costs."""
        if not self.slowness:
            return {(stage, replica): 1 for stage, ids in enumerate(self.replicas) for replica in ids}
        return {
            (stage, replica): factor
            for stage, (ids, factors) in enumerate(zip(self.replicas, self.slowness))
            for replica, factor in zip(ids, factors)
        }

    @cached_property
    def compute_time(self) -> tuple[int, ...]:
        """Time that each stage takes for one micro-batch, all of its chunks together."""
        costs = self.costs.total if self.has_backward else self.costs.forward
        return tuple(sum(costs[k] for k in mine) for mine in self.layout.virtual_stages)

    @property
    def whole_pipelines(self) -> tuple[int, ...]:
        """The replica ids that are alive at every stage."""
        return tuple(sorted(set.intersection(*map(set, self.replicas)))) if self.replicas else ()

    @property
    def is_straight(self) -> bool:
        """Whether all stages have the same replicas."""
        return all(len(ids) == len(self.whole_pipelines) for ids in self.replicas)

    def with_equal_costs(self) -> PlanRequest:
        """The same request with the textbook's costs, equal for all stages, forwards and halves of a backward."""
        return replace(self, costs=StageCosts.equal(self.costs.num_stages))
