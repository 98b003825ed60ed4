"""The interface of a pipeline schedule, which the simulator, the planner and the configuration ask.

A schedule decides in which order a replica wants to do its work and how much it may hold; the simulator
(`pipeline/simulator.py`) decides what is possible, and its run is the proof that the lists end. So one set of rules
serves straight grids, where it gives the papers' lists, and damaged ones, of which no paper writes.

Pure, and below the configuration, which takes names, limits and messages from here. docs/extending.md adds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from parallel3d.pipeline.chunk_layout import ChunkLayout

VirtualMicroBatch = tuple[int, int]
"""(micro-batch, chunk)"""


@dataclass(frozen=True, kw_only=True)
class Component:
    """The part of a grid that a schedule is asked about: replicas that share micro-batches, and how they are run."""

    layout: ChunkLayout
    routes: tuple[tuple[int, ...], ...]
    """`routes[micro-batch][stage]` is a replica; replicas are numbered over all stages."""
    stage_of: tuple[int, ...]
    """The stage of each replica."""
    splits_backward: bool
    """Whether the gradients of inputs and of weights are computed apart."""
    extra_in_flight: int
    """Micro-batches (of one chunk) that a replica may hold above the schedule's own limit."""

    @property
    def num_stages(self) -> int:
        return len(self.layout.virtual_stages)

    @property
    def num_chunks(self) -> int:
        """Chunks of each stage."""
        return len(self.layout.virtual_stages[0])

    @property
    def num_micro_batches(self) -> int:
        return len(self.routes)


@dataclass(frozen=True, kw_only=True)
class BrokenRule:
    """Why a schedule does not fit a grid, as a configuration error says it."""

    field: str
    """The field of section `parallel` to blame."""
    rule: str
    fix: str


class Schedule(ABC):
    """One pipeline schedule. Class attributes are its row for the configuration; methods are its rules."""

    name: str
    """As `parallel.schedule` names it."""
    summary: str
    """One or two sentences for the configuration reference."""
    min_chunks: int = 1
    """Virtual stages on each stage, at least."""
    max_chunks: int | None = 1
    """At most; None: any number."""
    is_default: bool = False
    """Taken where no schedule is named, for the numbers of chunks that it allows."""
    splits_backward: bool = False
    """Always computes the gradients of inputs and of weights apart."""
    limits_in_flight: bool = True
    """Whether a replica holds fewer micro-batches than there are; extra_in_flight means something only then."""
    suitable_micro_batches: str = "any number of micro-batches"
    """The micro-batches a replica with which the formula's bubble is reached, in words; `suits` decides."""
    backwards_wait: bool = False
    """Whether a replica runs all of its forwards before its first backward."""
    weights_follow: bool = False
    """With a split backward, whether the products for weights come right after it as long as forwards are left; else
    they run when nothing else can."""

    fills_budget: bool = True
    """Where the order is kept, whether a replica waits for forwards up to its budget before it runs a backward."""

    # --- where it fits --------------------------------------------------------------------------------------------

    def find_broken_rule(self, num_stages: int, num_chunks: int) -> BrokenRule | None:
        """The first reason why this schedule can't run on such a grid; None if it can."""
        if num_chunks < self.min_chunks or num_chunks > (self.max_chunks or num_chunks):
            return BrokenRule(
                field="virtual_stages",
                rule=f"parallel.schedule {self.name} needs {self._chunks_allowed}",
                fix=f"Set it to {self.min_chunks}, or choose another parallel.schedule",
            )
        if num_chunks > 1 and num_stages < 2:
            return BrokenRule(
                field="schedule",
                rule="chunks alternate between stages, and parallel.pp_size is 1",
                fix="Choose a schedule without virtual stages, or raise parallel.pp_size",
            )
        return None

    @property
    def _chunks_allowed(self) -> str:
        if self.max_chunks is None:
            return f"at least {self.min_chunks}"
        return f"{self.min_chunks}" if self.max_chunks == self.min_chunks else f"{self.min_chunks} to {self.max_chunks}"

    def chunk_layout(self, num_stages: int, num_chunks: int) -> ChunkLayout:
        """Which stage holds which chunk."""
        return ChunkLayout.round_robin(num_stages, num_chunks)

    def bubble(self, num_stages: int, num_chunks: int, num_micro_batches: float) -> float:
        """Idle share of an iteration by the paper's formula: equal costs, `num_micro_batches` a replica."""
        return (num_stages - 1) / (num_micro_batches * num_chunks + num_stages - 1)

    def suits(self, num_stages: int, num_micro_batches: float) -> bool:
        """Whether the formula's bubble is reached with this number of micro-batches a replica."""
        return True

    # --- what a replica does --------------------------------------------------------------------------------------

    def forward_order(self, component: Component, stage: int) -> list[VirtualMicroBatch]:
        """All virtual micro-batches in the order in which a replica of `stage` wants to run their forwards.

        A replica runs its own part of it, and takes what comes first among those that have arrived.
        """
        return [(micro_batch, 0) for micro_batch in range(component.num_micro_batches)]

    def backward_order(self, component: Component, stage: int) -> list[VirtualMicroBatch]:
        """The same for backwards."""
        return self.forward_order(component, stage)

    def keeps_order(self, component: Component) -> bool:
        """Whether replicas wait for what is next in the order, whatever else has arrived."""
        return False

    @abstractmethod
    def in_flight_budgets(self, component: Component) -> list[int]:
        """For each replica: virtual micro-batches that it may hold between their forwards and their backwards."""

    def deferred_budgets(self, component: Component) -> list[int]:
        """With a split backward, for each replica: those it may hold until the gradients of their weights are done."""
        return [max(self.in_flight_budgets(component))] * len(component.stage_of)

    def prefers_backward(self, component: Component) -> bool:
        """Whether a replica that could start either starts a backward.

        A forward usually comes first, because later stages wait for it. With extra micro-batches in flight there is
        room to be generous: pp4 x dp4 with one replica lost takes 34 units instead of 36 (split backward).
        """
        return component.splits_backward and component.extra_in_flight > 0
