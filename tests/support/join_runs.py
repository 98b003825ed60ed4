"""Runs in threads in which ranks die and new ones join, compared bit for bit with the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from parallel3d.config.schema import Config, FaultConfig
from parallel3d.inprocess.harness import ElasticRunResult, run_elastic_in_threads
from parallel3d.inprocess.thread_joins import Joins
from parallel3d.parallel.grid import PartId
from parallel3d.trainer.checkpointing import CheckpointSaver, NoSaver
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.resume import resume
from parallel3d.worker.fault_injection import FaultInjector
from tests.support import tiny_runs
from tests.support.saved_layouts import TEXT
from tests.support.thread_kills import assert_same_run, fault_hooks, run


def dies(rank: int, step: int, phase: str = "forward") -> FaultConfig:
    return FaultConfig(rank=rank, step=step, phase=phase)


def run_with_joins(
    config: Config,
    faults: Sequence[FaultConfig],
    steps: Sequence[int],
    *,
    start: Path | None = None,
    save: Callable[[RankContext], CheckpointSaver] = lambda rank: NoSaver(),
    moves: bool = False,
    surplus: Mapping[int, PartId] = MappingProxyType({}),
) -> ElasticRunResult:
    """Trains from the checkpoint `start`, or from the seed; a new worker joins in each of `steps`, and with `moves`
    spares build other parts than theirs. `surplus`: the parts that new workers build although none is missing."""
    grid = build_grid(config)

    def prepare(rank: int, injector: FaultInjector) -> RankContext:
        context = tiny_runs.prepare(config, grid, rank, hooks=fault_hooks(injector, config))
        if start is not None:
            resume(context, start, TEXT)
        return context

    def prepare_joiner(rank: int, injector: FaultInjector, part: PartId) -> RankContext:
        return tiny_runs.prepare(config, grid, rank, hooks=fault_hooks(injector, config), part=part)

    joins = Joins(steps=steps, moves=moves, surplus=surplus, prepare=prepare_joiner)
    return run_elastic_in_threads(config, prepare, faults, save=save, joins=joins)


def check_joins(
    config: Config,
    faults: Sequence[FaultConfig],
    steps: Sequence[int],
    *,
    num_changes: int,
    lacks: int = 0,
) -> ElasticRunResult:
    """The run is the undisturbed one, and ends with all replicas of the first grid but `lacks`."""
    done = run_with_joins(config, faults, steps)
    assert_same_run(done, run(config))
    assert done.num_changes == num_changes
    assert sum(done.widths) == sum(len(stage) for stage in build_grid(config).stages) - lacks
    return done
