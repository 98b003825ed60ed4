"""The table of deaths, (layout, deaths), and what may come of them.

How many membership changes there are is exact wherever the protocol makes it so:

    one death                                      one
    a second one in the recovery, before the go    one: nothing was in force yet
    a second one after the go (new groups)         two
    two deaths two or more steps apart             two: all ranks have finished the step between them
    two deaths in one step                         one or two, as the coordinator learns of the second before all have
                                                   confirmed the change for the first, or after

Of deaths that may leave an entry behind (all-reduce, update, all-gather, evaluation) there is one in a step: a rank
that learns of another's death leaves the step by a shorter way, which does not enter that phase.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations, count, cycle, groupby, product

from parallel3d.config.schema import Config, FaultConfig
from parallel3d.elastic.protocol.survivability import check_survivability
from parallel3d.elastic.protocol.vacancies import GridTarget, fill
from parallel3d.parallel.grid import Grid
from parallel3d.trainer.plans import build_grid
from tests.support.kill_layouts import (
    AFTER_GO,
    BASE,
    BEFORE_GO,
    EARLY,
    KILL_LAYOUTS,
    LATE,
    SCHEDULES,
    config_of,
    grid_of,
    phases_of,
)

STEP = 2
"""The step of a fault unless a cell names another; an evaluation follows it."""
MAY_LEAVE_AN_ENTRY = ("all_reduce", *LATE)


def kill_fault(rank: int, phase: str, step: int = STEP, kind: str = "kill") -> FaultConfig:
    return FaultConfig(rank=rank, phase=phase, step=step, kind=kind)


@dataclass(frozen=True, kw_only=True)
class KillCell:
    """One run in which ranks die."""

    layout: str
    faults: tuple[FaultConfig, ...]
    num_steps: int = 3
    zero_stage: int = 1

    @property
    def name(self) -> str:
        zero = [] if self.zero_stage else ["zero0"]
        return "+".join([self.layout, *zero, *(f"{f.kind}-{f.rank}-{f.phase}-{f.step}" for f in self.faults)])

    @property
    def config(self) -> Config:
        """The configuration of the run in threads."""
        return config_of(self.layout, num_steps=self.num_steps, zero_stage=self.zero_stage)

    @property
    def axes(self) -> dict[str, object]:
        """Axes for the quick tier, which covers each schedule, each other group of variants and each phase once."""
        group = KILL_LAYOUTS[self.layout].group
        if len(self.faults) == 1 and group != "base":
            return {"variant": self.layout if group == "schedule" else group, "variant phase": self.faults[0].phase}
        axes: dict[str, object] = {"layout": self.layout, "zero": self.zero_stage}
        for number, fault in enumerate(self.faults):
            axes |= {f"rank {number}": fault.rank, f"phase {number}": fault.phase}
        return axes


# --- one death --------------------------------------------------------------------------------------------------------


def base_cells() -> Iterator[KillCell]:
    """Every rank of the base layouts in every phase."""
    for layout in BASE:
        grid = grid_of(layout)
        for rank in grid.ranks:
            yield from (KillCell(layout=layout, faults=(kill_fault(rank, phase),)) for phase in phases_of(grid, rank))


def variant_cells() -> Iterator[KillCell]:
    """Deaths on other schedules, models, policies and data, where these matter most."""
    for layout, row in KILL_LAYOUTS.items():
        for rank, phase in _VARIANTS.get(row.group, _no_deaths)(layout):
            yield KillCell(layout=layout, faults=(kill_fault(rank, phase),))


def _no_deaths(layout: str) -> Iterable[tuple[int, str]]:
    return ()


def _under_a_schedule(layout: str) -> Iterator[tuple[int, str]]:
    """Every rank in every phase; on three stages a third of them. The ranks that are left run another plan."""
    grid = grid_of(layout)
    for rank in grid.ranks:
        for number, phase in enumerate(phases_of(grid, rank)):
            if not layout.endswith("-pp3") or (number + rank) % 3 == 0:
                yield rank, phase


def _of_a_precision(layout: str) -> Iterator[tuple[int, str]]:
    """A rank of each stage in turn: moved state and a repeated update's noise are those of the undisturbed run."""
    grid = grid_of(layout)
    for phase in phases_of(grid, 0):
        yield (1 if phase in ("load", "backward", "backup", "update") else grid.ranks[-1]), phase


def _of_a_shared_matrix(layout: str) -> Iterator[tuple[int, str]]:
    """Every rank whose loss is survived, three phases each in turn; two of them involve the matrix. Without `send`:
    with few micro-batches not every rank receives anything after one."""
    grid = grid_of(layout)
    for rank in grid.ranks if layout in SHARED_MATRIX_LAYOUTS else ():
        if not after(config_of(layout), {rank}).goes_on:
            continue
        turn = rank + SHARED_MATRIX_LAYOUTS.index(layout)
        for number in (2 * turn, 2 * turn + 1):
            yield rank, SHARED_MATRIX_PHASES[number % len(SHARED_MATRIX_PHASES)]
        others = [phase for phase in phases_of(grid, rank) if phase not in (*SHARED_MATRIX_PHASES, "send")]
        yield rank, others[turn % len(others)]


SHARED_MATRIX_LAYOUTS = ("tied-pp2-dp2-tp2", "tied-pp3-dp2", "tied-stages-2-1-3", "tied-interleaved", "tied-zb-v")
SHARED_MATRIX_PHASES = ("reduce_scatter", "backup", "all_reduce", "update", "all_gather")

_VARIANTS = {
    "schedule": _under_a_schedule,
    "precision": _of_a_precision,
    "tied": _of_a_shared_matrix,
    "model": lambda layout: product((0, 3, 6), ("forward", *EARLY[3:], "update")),
    "recompute": lambda layout: product((0, 6), ("forward", "backward")),
    "documents": lambda layout: product((0, 3, 5), ("forward", "send", "backward", "all_reduce")),
    "blend": lambda layout: product(
        (grid_of(layout).dp_ranks(0, 0)[-1],), ("load", "backward", "all_reduce", "update")
    ),
}
"""(rank, phase) of the single deaths on the layouts of a group."""


# --- further deaths in the recovery -----------------------------------------------------------------------------------


def recovery_cells() -> Iterator[KillCell]:
    """On each base layout some first deaths, in phases that take turns, and every possible second one."""
    turns = count()
    for layout, ranks in {"pp2-dp2-tp2": (0, 6), "pp3-dp2": (3,), "pp2-dp4": (5,)}.items():
        grid = grid_of(layout)
        for first in ranks:
            left, _ = grid.without({first})
            phases = phases_of(grid, first)
            for second, recovery in product(sorted(set(grid.ranks) - {first}), (*BEFORE_GO, AFTER_GO)):
                if recovery == AFTER_GO and not left.holds(second):
                    continue  # a spare has no groups
                phase = phases[next(turns) % len(phases)]
                yield KillCell(layout=layout, faults=(kill_fault(first, phase), kill_fault(second, recovery)))


def tied_recovery_cells() -> Iterator[KillCell]:
    """Holders of a shared matrix: one of each end, and two of one end."""
    turns = cycle(product((*BEFORE_GO, AFTER_GO), SHARED_MATRIX_PHASES))
    for layout in ("tied-pp2-dp4", "tied-stages-2-1-3"):
        embedding_ranks = grid_of(layout).embedding_ranks(0)
        for first, second in combinations(embedding_ranks, 2):
            if len(embedding_ranks) > 5 and {first, second}.isdisjoint({1, 6}):
                continue  # enough of the large one
            recovery, phase = next(turns)
            yield KillCell(layout=layout, faults=(kill_fault(first, phase), kill_fault(second, recovery)))


def trio_cells() -> Iterator[KillCell]:
    """Two more deaths before the new generation is in force."""
    for (first, *others), phase in product([(0, 2, 3), (0, 1, 4), (1, 6, 4), (7, 5, 2), (3, 4, 5)], BEFORE_GO):
        faults = (kill_fault(first, "backward"), *(kill_fault(rank, phase) for rank in others))
        yield KillCell(layout="pp2-dp4", faults=faults)


# --- deaths in several steps ------------------------------------------------------------------------------------------


def random_cells() -> Iterator[KillCell]:
    """Two or three deaths of different replicas, in two steps that are not neighbours."""
    for layout, seed in product(BASE, range(12)):
        numbers, grid = random.Random(f"{layout} {seed}"), grid_of(layout)
        replicas = [(stage, replica) for stage in range(grid.pp_size) for replica in sorted(grid.stages[stage])]
        faults, closed = [], set()
        for replica in numbers.sample(replicas, numbers.choice((2, 3))):
            rank, step = numbers.choice(grid.tp_ranks(replica)), numbers.choice((2, 4))
            phases = phases_of(grid, rank)
            phase = numbers.choice([phase for phase in phases if step not in closed or phase not in MAY_LEAVE_AN_ENTRY])
            closed |= {step} if phase in MAY_LEAVE_AN_ENTRY else set()
            faults.append(kill_fault(rank, phase, step))
        yield KillCell(layout=layout, faults=tuple(faults), num_steps=5)


def schedule_pair_cells() -> Iterator[KillCell]:
    """No pipeline is whole any more: every micro-batch of one of them changes its replica, chunk after chunk."""
    for layout in SCHEDULES:
        yield KillCell(layout=layout, faults=(kill_fault(0, "backward"), kill_fault(3, "forward", 4)), num_steps=5)


def precision_series_cells() -> Iterator[KillCell]:
    """The state moves twice, and a replica dies while it does."""
    for policy in ("bf16", "bf16_sr"):
        faults = (
            kill_fault(0, "update"),
            kill_fault(2, "recovery_moves"),
            kill_fault(5, "backup", 4),
            kill_fault(3, "all_reduce", 4),
        )
        yield KillCell(layout=f"{policy}-pp2-dp4", faults=faults, num_steps=5)


def down_to_one_cells() -> Iterator[KillCell]:
    """A death a step, each in another phase, until two ranks of eight are left, each with all of its stage."""
    orders = [(0, 1, 2, 4, 5, 6), (7, 0, 6, 3, 5, 1), (2, 7, 1, 6, 3, 4)]
    plain = ("forward", "backward", "reduce_scatter", "backup", "send", "all_reduce")
    shared = ("update", "reduce_scatter", "backup", "all_gather", "all_reduce", "forward")
    for layout, phases, zero_stage in product(("pp2-dp4", "tied-pp2-dp4"), (plain, shared), (0, 1)):
        if (phases is shared) != layout.startswith("tied"):
            continue
        for order in orders if phases is plain else orders[:2]:
            faults = tuple(kill_fault(rank, phase, 2 + n) for n, (rank, phase) in enumerate(zip(order, phases)))
            yield KillCell(layout=layout, faults=faults, num_steps=8, zero_stage=zero_stage)


# --- what may come of it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The dead ranks, the number of committed membership changes, whether the run goes on."""

    dead: frozenset[int]
    num_changes: int
    goes_on: bool


def after(config: Config, *changes: Collection[int]) -> Outcome:
    """The outcome of deaths that are handled in this order, a set of ranks with each change."""
    first, dead = build_grid(config), frozenset[int]()
    grid = first
    for number, ranks in enumerate(changes):
        dead |= frozenset(ranks)
        survivability = check_survivability(
            grid,
            zero_stage=config.parallel.zero_stage,
            zero_backups=config.elastic.zero_backups,
            hosts={},
            dead=ranks,
            next_grid=(left := _refilled(grid, first, dead)),
        )
        if not survivability.can_continue:
            return Outcome(dead, number, False)
        grid = left
    return Outcome(dead, len(changes), True)


def _refilled(grid: Grid, first: Grid, dead: Collection[int]) -> Grid:
    """The grid after these deaths, its vacancies filled by spares."""
    left, _ = grid.without(dead)
    return fill(
        left,
        target=GridTarget.of(first),
        candidates={rank: first.part(rank) for rank in first.ranks if rank not in dead and not left.holds(rank)},
        hosts={},
        holders=grid,
    )


def possible_outcomes(config: Config, faults: Iterable[FaultConfig]) -> set[Outcome]:
    """All outcomes that the protocol allows: a run that goes on has seen all deaths."""
    faults = sorted(faults, key=lambda fault: fault.step)
    orders = [list(_orders_of(list(group))) for _, group in groupby(faults, key=lambda fault: fault.step)]
    found = {after(config, *chain(*waves)) for waves in product(*orders)}
    return {outcome for outcome in found if not outcome.goes_on or outcome.dead == {fault.rank for fault in faults}}


def _orders_of(faults: list[FaultConfig]) -> Iterator[list[frozenset[int]]]:
    """The ways in which the deaths of one step may be handled: lists of changes."""
    early, late, before_go, after_go = (
        {fault.rank for fault in faults if fault.phase in phases} for phases in (EARLY, LATE, BEFORE_GO, (AFTER_GO,))
    )
    if not before_go | after_go:
        yield from _partitions(early, late)
        return
    first = early | late
    assert len(first) == 1, "which death the recovery follows"
    for size in range(len(before_go) + 1):  # fewer than all may be too many already
        for others in combinations(sorted(before_go), size):
            waves = [frozenset(first | set(others)), frozenset(after_go)]
            yield [wave for wave in waves if wave]


def _partitions(ranks: set[int], late: set[int]) -> Iterator[list[frozenset[int]]]:
    """Ordered partitions of `ranks`, and at the end those that die after the step's entry."""
    if not ranks:
        yield [frozenset(late)] if late else []
        return
    for size in range(1, len(ranks) + 1):
        for first in combinations(sorted(ranks), size):
            for rest in _partitions(ranks - set(first), late):
                yield [frozenset(first), *rest]
