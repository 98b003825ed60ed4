"""The grid of a run and the pipeline plans for it, from the configuration. Pure.

A plan holds the instruction list of every replica for one number of micro-batches. Warmups change that number, slow
replicas the routes, losses the grid: each generation has its own `Plans`, which are computed on first use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from parallel3d.config.derived import head_size, num_key_value_heads, num_mlp_matrices, stage_replicas
from parallel3d.config.schema import Config
from parallel3d.elastic.protocol.vacancies import GridTarget
from parallel3d.parallel.grid import Coordinates, Grid
from parallel3d.pipeline.chunk_layout import ChunkLayout
from parallel3d.pipeline.partition import (
    ModelCosts,
    StageCosts,
    model_costs,
    partition_from_counts,
    partition_layers,
    pass_costs,
)
from parallel3d.pipeline.planner import Plan
from parallel3d.pipeline.request import Pause, PlanRequest, Routes, no_pause
from parallel3d.pipeline.schedules import find_schedule, schedule_code
from parallel3d.pipeline.slow_plan import choose_plan_for_slow
from parallel3d.trainer.batching import next_batch, plan_batch
from parallel3d.trainer.entry import UnitTime
from parallel3d.trainer.state import TrainState


def build_grid(config: Config) -> Grid:
    """The grid with which a run begins."""
    return Grid.of_replicas(stage_replicas(config), tp_size=config.parallel.tp_size, order=config.parallel.order)


def build_target(config: Config) -> GridTarget:
    """The widths that workers of the run fill: those of the first grid, or `elastic.max_replicas`."""
    passes = costs_of_passes(config)
    costs = [forward + backward for forward, backward in zip(passes.forward, passes.backward)]
    return GridTarget.of(
        build_grid(config),
        max_replicas=config.elastic.max_replicas,
        costs=[sum(costs[chunk] for chunk in chunks) for chunks in chunk_layout_of(config).virtual_stages],
        num_micro_batches=plan_batch(config, 0).num_micro_batches,
    )


def widest_grid(config: Config, first: Grid) -> Grid:
    """A grid as wide as a run that begins with `first` can get."""
    return GridTarget.of(first, max_replicas=config.elastic.max_replicas).widest()


PlanKey = tuple[tuple[tuple[int, ...], ...], int]
"""The replicas of each stage, and the number of micro-batches."""


@dataclass(frozen=True)
class Plans:
    """The plans for one grid, each computed when it is first needed, unless it is one of those `made_ahead`."""

    config: Config
    grid: Grid
    made_ahead: Mapping[PlanKey, Plan] = field(default_factory=dict)

    _made: dict[tuple[int, Routes, bool], Plan] = field(default_factory=dict)

    def train(self, num_micro_batches: int, slowness: Routes = (), pause: Pause = no_pause) -> Plan:
        """The plan of a training step of `num_micro_batches`."""
        ahead = None if slowness else self.made_ahead.get((self.grid.replicas, num_micro_batches))
        return ahead or self._make(num_micro_batches, slowness, pause=pause)

    def next(self, state: TrainState, pause: Pause = no_pause) -> Plan:
        """The plan of the iteration after `state`."""
        return self.train(next_batch(self.config, state).num_micro_batches, self.slowness(state), pause)

    def evaluate(self, state: TrainState) -> Plan:
        """The forward passes of an evaluation after `state`."""
        num_micro_batches = plan_batch(self.config, 0).num_micro_batches * self.config.run.evaluate_batches
        return self._make(num_micro_batches, self.slowness(state), has_backward=False)

    def slowness(self, state: TrainState) -> Routes:
        """How slow the replicas are, for a plan; () if none is."""
        return state.speeds.of_grid(self._newest_workers) if state.speeds.slowness else ()

    @cached_property
    def _newest_workers(self) -> Routes:
        """The newest worker of each replica, in the order of `grid.replicas`: the names of their speeds."""
        return tuple(tuple(max(stage[d]) for d in sorted(stage)) for stage in self.grid.stages)

    def _make(
        self, num_micro_batches: int, slowness: Routes, *, has_backward: bool = True, pause: Pause = no_pause
    ) -> Plan:
        key = num_micro_batches, slowness, has_backward
        if key not in self._made:
            if slowness != self._slowness_made:
                self._made.clear()  # the plans for other speeds
            self._made[key] = plan_schedule(
                self.config, self.grid, num_micro_batches, slowness=slowness, has_backward=has_backward, pause=pause
            )
        return self._made[key]

    @property
    def _slowness_made(self) -> Routes:
        return next((slowness for _, slowness, _ in self._made), ())


def num_micro_batches_at(plan: Plan, coordinates: Coordinates) -> int:
    """Number of micro-batches that the plan routes through one replica."""
    return sum(route[coordinates.pp] == coordinates.dp for route in plan.routes)


def unit_times(grid: Grid, plan: Plan, busy_s: Mapping[int, float], num_tokens: int) -> tuple[UnitTime, ...]:
    """The time of each replica for a token: the seconds of its slowest rank in a step of `num_tokens`, by its share.

    To three digits, so that entries stay short. 0 for replicas without work, or with a rank whose seconds are unknown.
    """
    counts = Counter(pair for route in plan.routes for pair in enumerate(route))
    num_tokens_each = num_tokens / len(plan.routes)
    times = []
    for stage, replicas in enumerate(grid.stages):
        for replica, ranks in sorted(replicas.items()):
            seconds = [busy_s[rank] for rank in ranks]
            share = counts[stage, replica] * num_tokens_each
            time = max(seconds) / share if share and min(seconds) > 0 else 0.0
            times.append((stage, max(ranks), float(f"{time:.3g}")))
    return tuple(times)


def plan_schedule(
    config: Config,
    grid: Grid,
    num_micro_batches: int,
    *,
    slowness: Routes = (),
    has_backward: bool = True,
    pause: Pause = no_pause,
) -> Plan:
    """The plan for the replicas that `grid` has.

    Where stages have different replicas, by a loss or from the start, or some are slow, it is the best of those that
    were compared.
    """
    request = PlanRequest(
        replicas=grid.replicas,
        num_micro_batches=num_micro_batches,
        schedule=config.parallel.schedule,
        has_backward=has_backward,
        costs=costs_of_passes(config),
        virtual_stages=config.parallel.virtual_stages,
        slots=config.parallel.p2p_slots,
        slowness=slowness,
    )
    with schedule_code(request.schedule):
        return choose_plan_for_slow(
            request,
            may_split=config.parallel.split_backward != "never",
            max_extra_in_flight=config.parallel.max_extra_in_flight,
            pause=pause,
        )


def split_layers(config: Config) -> tuple[range, ...]:
    """The layers of each virtual stage: `parallel.layers_per_stage`, or balanced by cost (embedding and head too)."""
    if config.parallel.layers_per_stage is not None:
        return partition_from_counts(config.parallel.layers_per_stage)
    costs = costs_of(config)
    layers = [costs.layer] * config.model.num_hidden_layers
    num_stages = config.parallel.pp_size * config.parallel.virtual_stages
    return partition_layers(layers, num_stages, costs.embedding, costs.head)


def chunk_layout_of(config: Config) -> ChunkLayout:
    """Which stage holds which virtual stage."""
    parallel = config.parallel
    with schedule_code(parallel.schedule):
        return find_schedule(parallel.schedule).chunk_layout(parallel.pp_size, parallel.virtual_stages)


def costs_of_passes(config: Config) -> StageCosts:
    """Cost of the passes of each virtual stage."""
    return pass_costs(split_layers(config), costs_of(config), recomputes=config.parallel.recompute == "full")


def costs_of(config: Config) -> ModelCosts:
    """Cost of a token in each part of the model."""
    model = config.model
    return model_costs(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=num_key_value_heads(model),
        vocab_size=model.vocab_size,
        sequence_length=config.batch.sequence_length,
        num_mlp_matrices=num_mlp_matrices(model),
        head_size=head_size(model),
    )
