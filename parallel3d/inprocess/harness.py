"""Runs a configuration with every rank as a thread of this process: a few steps, or an elastic run with faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel3d.comparison.collect import local_weights, owned_grad_ranges, run_rank, shardings
from parallel3d.comparison.run_result import RankResult, RunResult, assemble_run
from parallel3d.config.schema import Config, FaultConfig
from parallel3d.elastic.protocol.membership import Address, GenerationRecord
from parallel3d.errors import RunEnded
from parallel3d.inprocess.scheduler import RankDied
from parallel3d.inprocess.thread_coordinator import ThreadCoordinator
from parallel3d.inprocess.thread_joins import NO_JOINS, Joins, ThreadJoins
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.group import Group
from parallel3d.trainer.checkpointing import CheckpointSaver, NoSaver
from parallel3d.trainer.context import RankContext, Transports
from parallel3d.trainer.loop import Trainer
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.recovery import Network, RecoveryManager
from parallel3d.worker.fault_injection import FaultInjector

BuildRank = Callable[[int, Transports], RankContext]

MAX_RUN_S = 86_400.0
"""Deadlocks of threads are detected at once, not by a timeout."""


def run_in_threads(
    grid: Grid,
    build: BuildRank,
    num_steps: int,
    *,
    slots: int = 3,
    on_step: Callable[[int], None] = lambda step: None,
) -> RunResult:
    """Trains `num_steps` with every rank of the grid as a thread; calls `on_step` after each of the first rank's."""

    def body(rank: int, world: ThreadWorld) -> RankResult:
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        runtime = build(rank, transports)
        runtime.executor.on_instruction = lambda step: world.doing(rank, str(step))
        return run_rank(runtime, num_steps, on_step if rank == grid.ranks[0] else lambda step: None)

    world = ThreadWorld(len(grid.ranks), slots=slots)
    return assemble_run(run_threads(len(grid.ranks), body, world=world, timeout_s=MAX_RUN_S))


@dataclass(kw_only=True)
class ElasticRunResult:
    """The result of an elastic run in threads; `run` is None if it could not go on, for `abort_reason`."""

    run: RunResult | None
    steps: dict[int, dict[str, Any]]
    """The leader's record of every step."""
    num_changes: int
    """Committed changes of membership."""
    abort_reason: str
    dead: tuple[int, ...]
    moved_bytes: int
    num_tokens: int
    widths: tuple[int, ...] = ()
    """Replicas of each stage at the end."""
    evaluations: Mapping[int, float] = field(default_factory=dict)
    """The leader's losses, by step."""
    notices: tuple[str, ...] = ()
    """Notices of all ranks."""
    balances: tuple[dict[str, Any], ...] = ()
    """The leader's records of slow replicas."""
    drains: tuple[dict[str, Any], ...] = ()
    """Of those that have left since they were slow."""


class ThreadNetwork(Network):
    """Transports of a rank that is a thread."""

    def __init__(self, world: ThreadWorld, rank: int):
        self._world = world
        self._rank = rank

    def listen(self, generation: int) -> Address:
        return ("threads", generation)

    def transports(self, record: GenerationRecord, token: AbortToken, former: Sequence[Group] = ()) -> Transports:
        self._world.begin_generation(self._rank, token)
        links = self._world.links(self._rank, record.generation)
        return Transports(make_group=self._world.make_group(self._rank), links=links, token=token)


@dataclass(kw_only=True)
class _Records:
    """The records that ranks publish."""

    coordinator: ThreadCoordinator
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    balances: list[dict[str, Any]] = field(default_factory=list)
    drains: list[dict[str, Any]] = field(default_factory=list)

    def publish(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "notice":
                self.notices.append(record["text"])
            case "balance":
                self.balances.append(record)
            case "drain_slow" if self.coordinator.drain(record["ranks"]):
                self.drains.append(record)
            case "evaluation":
                self.evaluations[record["step"]] = record["loss"]
            case "step" if record["step"] not in self.steps:
                self.steps[record["step"]] = record
                self.coordinator.protocol.last_reported_step = record["step"]


def run_elastic_in_threads(
    config: Config,
    prepare: Callable[[int, FaultInjector], RankContext],
    faults: Sequence[FaultConfig],
    *,
    save: Callable[[RankContext], CheckpointSaver] = lambda rank: NoSaver(),
    stop_at: int | None = None,
    joins: Joins = NO_JOINS,
) -> ElasticRunResult:
    """Trains to the end of `config`, or to the step `stop_at`, with the real trainer, while `faults` take ranks out and
    new ones join.

    `prepare(rank, injector)` makes a rank as `build.prepare_rank` does, `save` its saver.
    """
    grid = build_grid(config)
    num_workers = len(grid.ranks) + len(joins.steps)
    world = ThreadWorld(num_workers, slots=config.parallel.p2p_slots)
    coordinator = ThreadCoordinator(world, config)
    records = _Records(coordinator=coordinator)
    thread_joins = ThreadJoins(world, coordinator, joins, first_rank=len(grid.ranks))

    def train(runtime: RankContext, injector: FaultInjector) -> bool:
        callbacks = dict(
            stop_requested=lambda: stop_at is not None and runtime.state.iteration + 1 >= stop_at,
            on_phase=lambda phase, step: thread_joins.begin_step(runtime.rank, injector, step),
        )
        return _build_trainer(runtime, world, coordinator, records, saver=save(runtime), **callbacks).run()

    def body(rank: int, world: ThreadWorld) -> RankResult | None:
        injector = FaultInjector(
            tuple(faults),
            rank,
            lambda kind: _inject_fault(coordinator, rank, kind),
            joiner=rank - len(grid.ranks) + 1,
            coordinates=lambda: str(runtime.coordinates),
        )
        try:
            runtime = prepare(rank, injector) if grid.holds(rank) else thread_joins.build(rank, injector)
            initial, is_here = local_weights(runtime) if grid.holds(rank) else {}, train(runtime, injector)
            while part := coordinator.memberships[rank].take_move():
                runtime = thread_joins.build_part(rank, injector, part)
                initial, is_here = {}, train(runtime, injector)
        except RankDied:
            coordinator.on_lost(rank, "killed")
            raise
        except RunEnded:
            return None
        return _elastic_rank_result(runtime, initial) if is_here else None

    return _elastic_result(run_threads(num_workers, body, world=world), grid, records)


def _build_trainer(
    rank: RankContext, world: ThreadWorld, coordinator: ThreadCoordinator, records: _Records, **callbacks: Any
) -> Trainer:
    """The trainer of a rank that is a thread."""
    membership, network = coordinator.memberships[rank.rank], ThreadNetwork(world, rank.rank)
    return Trainer(
        rank=rank,
        recovery=RecoveryManager(rank, membership, network, host="", publish=records.publish),
        publish=records.publish,
        drain_requested=lambda: rank.rank in coordinator.draining,
        change_requested=lambda: membership.change_requested,
        **callbacks,
    )


def _elastic_result(results: list[RankResult | None], grid: Grid, records: _Records) -> ElasticRunResult:
    coordinator, runs = records.coordinator, [run for run in results if run is not None]
    committed = coordinator.protocol.committed
    return ElasticRunResult(
        run=assemble_run(runs) if runs else None,
        steps=records.steps,
        num_changes=coordinator.protocol.num_changes,
        abort_reason=coordinator.abort_reason,
        dead=tuple(rank for rank in grid.ranks if rank not in coordinator.protocol.live),
        widths=tuple(len(stage) for stage in committed.grid.stages) if committed else (),
        moved_bytes=coordinator.moved_bytes,
        num_tokens=max((record["tokens"] for record in records.steps.values()), default=0),
        evaluations=records.evaluations,
        notices=tuple(records.notices),
        balances=tuple(records.balances),
        drains=tuple(records.drains),
    )


def _inject_fault(coordinator: ThreadCoordinator, rank: int, kind: str) -> None:
    """Drains the rank (term) or ends its thread (any other kind)."""
    if kind != "term":
        raise RankDied(f"rank {rank} dies")
    coordinator.announce_drain(rank)


def _elastic_rank_result(rank: RankContext, initial: dict[str, Any]) -> RankResult:
    evaluations = rank.state.evaluations
    return RankResult(
        coordinates=rank.coordinates,
        shardings=shardings(rank),
        entries=list(rank.state.entries),
        evaluation=evaluations[-1].loss if evaluations else None,
        initial=initial,
        weights=local_weights(rank),
        grad_ranges=owned_grad_ranges(rank),
    )
