"""What is asked of the planner: all that a plan depends on, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.partition import StageCosts

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "forward"]
"""forward: no backward passes, for evaluation."""
Routing = Literal["reroute", "drop"]
Routes = tuple[tuple[int, ...], ...]
"""routes[micro-batch][stage] = id of the replica."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """All that a plan depends on: ranks that hold the same request make the same plan."""

    replicas: tuple[tuple[int, ...], ...]
    """For each stage the ids of its live replicas, in any order and with gaps."""
    num_micro_batches: int
    schedule: PipelineSchedule
    costs: StageCosts
    """Of each virtual stage."""
    virtual_stages: int = 1
    """Chunks of layers on each stage. Chunk c of stage p is virtual stage c * num_stages + p: a micro-batch passes all
    stages once for each chunk, the same replica of a stage each time."""
    slots: int = 3
    """Messages that an ordered pair of replicas can hold unread."""
    routing: Routing = "reroute"
    """reroute: a micro-batch leaves its home replica only where that is lost; drop: replica ids that are not alive at
    every stage get no work."""
    split_backward: bool = False
    """Compute the gradients of inputs and of weights apart; schedule zb-h1 always does."""
    extra_in_flight: int = 0
    """Micro-batches (of one chunk) that a replica may hold above the schedule's own limit."""

    def __post_init__(self) -> None:
        num_stages, has_chunks = len(self.replicas), self.virtual_stages > 1
        num_costs = num_stages * self.virtual_stages
        broken = [
            (num_stages < 1, "there is no stage"),
            (not all(self.replicas), f"a stage has no replica: {self.replicas}"),
            (any(len(set(ids)) < len(ids) for ids in self.replicas), f"a replica id stands twice: {self.replicas}"),
            (self.num_micro_batches < 1, f"{self.num_micro_batches} micro-batches"),
            (self.schedule not in get_args(PipelineSchedule), f"unknown schedule {self.schedule!r}"),
            (self.virtual_stages < 1, f"{self.virtual_stages} virtual stages"),
            (
                has_chunks and self.schedule not in ("interleaved", "forward"),
                f"schedule {self.schedule!r} has one chunk a stage",
            ),
            (not has_chunks and self.schedule == "interleaved", "schedule 'interleaved' needs several chunks a stage"),
            (has_chunks and num_stages < 2, "several chunks need several stages"),
            (self.costs.num_stages != num_costs, f"costs of {self.costs.num_stages} stages, {num_costs} stages"),
            (self.slots < 1, f"{self.slots} slots"),
            (self.routing == "drop" and not self.whole_pipelines, f"no id is alive at every stage: {self.replicas}"),
            (self.split_backward and not self.has_backward, f"schedule {self.schedule!r} has no backward to split"),
            (self.extra_in_flight < 0, f"extra_in_flight {self.extra_in_flight}"),
        ]
        if reasons := [reason for is_broken, reason in broken if is_broken]:
            raise ScheduleError("no plan can be made: " + "; ".join(reasons))

    @property
    def num_stages(self) -> int:
        return len(self.replicas)

    @property
    def has_backward(self) -> bool:
        return self.schedule != "forward"

    @property
    def splits(self) -> bool:
        return self.split_backward or self.schedule == "zb-h1"

    @property
    def limits_in_flight(self) -> bool:
        """Whether extra_in_flight means anything."""
        return self.schedule in ("1f1b", "interleaved", "zb-h1")

    @property
    def compute_time(self) -> tuple[int, ...]:
        """Time that each stage takes for one micro-batch, all of its chunks together."""
        costs = self.costs.total if self.has_backward else self.costs.forward
        return tuple(sum(costs[stage :: self.num_stages]) for stage in range(self.num_stages))

    @property
    def whole_pipelines(self) -> tuple[int, ...]:
        """The replica ids that are alive at every stage."""
        return tuple(sorted(set.intersection(*map(set, self.replicas)))) if self.replicas else ()

    @property
    def is_straight(self) -> bool:
        """Whether all stages have the same replicas."""
        return all(len(ids) == len(self.whole_pipelines) for ids in self.replicas)

    def with_equal_costs(self) -> PlanRequest:
        """The same with the textbook's costs: every stage alike, both halves of a backward like a forward."""
        return replace(self, costs=StageCosts.equal(self.costs.num_stages))
