"""Measures the pure parts of a change of membership at sizes that no test machine has: CPU seconds, one process.

    python benchmarks/scale_pure.py [--workers 1024 4096 10240 100096]

Pipelines of 8 stages and 8 tensor-parallel ranks, 8 workers a host, ten workers lost on as many replicas; then as many
join. Of the rows, the answers (reports and confirmations, to the commit), "survivable" and "admission" are the
coordinator's, the others each worker's. "pipeline plan" has eight micro-batches for each replica: the best of all
candidates, its digest, which workers compare, and one worker's list.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d.elastic.protocol.membership import NO_GENERATION, LostWorker, StateReport
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.elastic.protocol.survivability import check_survivability
from parallel3d.optim.reshard import plan_equal_ranges
from parallel3d.optim.shard_map import ShardMap, plan_shard_maps
from parallel3d.parallel.grid import Grid
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import choose_plan
from parallel3d.pipeline.request import PlanRequest

STAGES, TP, PER_HOST, NUM_LOST = 8, 8, 8, 10
BUCKET_ELEMENTS = 1 << 22
MICRO_BATCHES_EACH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1024, 4096, 10240, 100_096])
    for num_workers in parser.parse_args().workers:
        measure(num_workers)


def measure(num_workers: int) -> None:
    """Prints the seconds of each part for one size."""
    grid = Grid.uniform(tp_size=TP, pp_size=STAGES, dp_size=num_workers // (STAGES * TP))
    hosts = {rank: f"host{rank // PER_HOST}" for rank in grid.ranks}
    step = max(1, num_workers // NUM_LOST)
    dead = {rank for rank in range(0, step * NUM_LOST, step) if rank < num_workers}
    protocol = MembershipProtocol(grid, zero_stage=1, zero_backups=1)
    first, second = (reports_of(grid, hosts, lost, number) for number, lost in enumerate((set(), dead)))
    parts: dict[str, Callable[[], object]] = {
        "answers at the start": lambda: answer(protocol, first, set()),
        "answers after the losses": lambda: answer(protocol, second, dead),
        "survivable": lambda: check_survivability(grid, zero_stage=1, zero_backups=1, hosts=hosts, dead=dead),
        "new grid": lambda: grid.without(dead)[0].ranks,
        "pipeline plan": lambda: plan_pipelines(grid, dead),
        "shard maps of a worker": lambda: maps_of(grid, hosts),
        "admission of joiners": lambda: admit(protocol, grid, hosts, dead),
        "answers with the joiners": lambda: answer_join(protocol, hosts),
        "moves of a bucket": lambda: plan_moves(grid, hosts, dead),
    }
    print(
        f"\n{num_workers:,} workers ({STAGES} stages x {num_workers // (STAGES * TP)} replicas x tp {TP}), CPU seconds"
    )
    for name, part in parts.items():
        started = time.process_time()
        part()
        print(f"  {name:24} {time.process_time() - started:9.4f}", flush=True)


def reports_of(grid: Grid, hosts: dict[int, str], dead: set[int], generation: int) -> list[StateReport]:
    """Returns the reports of all that live to generation 0, or to the one after it."""
    return [
        StateReport(rank=rank, generation=generation, state_generation=generation - 1, host=hosts[rank])
        for rank in grid.ranks
        if rank not in dead
    ]


def answer(protocol: MembershipProtocol, reports: list[StateReport], dead: set[int]) -> None:
    """Gives the protocol the losses, then all reports and confirmations, to the commit."""
    protocol.on_lost([LostWorker(rank=rank, why="killed") for rank in dead])
    for report in reports:
        protocol.report(report)
    generation = reports[0].generation
    for report in reports:
        protocol.confirm(report.rank, generation, "the same plan")
    assert protocol.committed is not None and protocol.committed.generation == generation


def admit(protocol: MembershipProtocol, grid: Grid, hosts: dict[int, str], dead: set[int]) -> None:
    """Has a worker join in the place of each lost one, on its host."""
    for number, rank in enumerate(sorted(dead)):
        assert protocol.choose_part() is not None
        joiner = len(grid.ranks) + number
        hosts[joiner] = hosts[rank]
        protocol.admit(joiner, grid.part(rank), hosts[joiner])


def answer_join(protocol: MembershipProtocol, hosts: dict[int, str]) -> None:
    """Gives the protocol the request of the change with which joiners enter, all reports and all confirmations."""
    first = protocol.committed
    assert first is not None
    generation, members = first.generation + 1, frozenset(first.members)
    protocol.suspect(first.leader, first.generation, "workers join")
    ranks = sorted(protocol.live)
    for rank in ranks:
        state_generation = generation - 1 if rank in members else NO_GENERATION
        report = StateReport(rank=rank, generation=generation, state_generation=state_generation, host=hosts[rank])
        protocol.report(report)
    for rank in ranks:
        protocol.confirm(rank, generation, "the same plan")
    assert protocol.committed.generation == generation
    assert protocol.live == set(protocol.committed.grid.ranks), "all are in the grid again, the spares, too"


def plan_pipelines(grid: Grid, dead: set[int]) -> None:
    """Plans an iteration on the grid that is left as a worker does, with the defaults' schedule and candidates."""
    smaller, _ = grid.without(dead)
    request = PlanRequest(
        replicas=smaller.replicas,
        num_micro_batches=MICRO_BATCHES_EACH * len(grid.replicas[0]),
        schedule="1f1b",
        costs=StageCosts.equal(grid.pp_size),
    )
    plan = choose_plan(request, may_split=True, max_extra_in_flight=2)
    at = smaller.coordinates(smaller.ranks[0])
    assert plan.candidates and plan.digest and plan.lists[at.pp, at.dp]


def maps_of(grid: Grid, hosts: dict[int, str]) -> ShardMap:
    return plan_shard_maps(grid, 0, 0, zero_stage=1, zero_backups=1, hosts=hosts).stage


def plan_moves(grid: Grid, hosts: dict[int, str], dead: set[int]) -> None:
    """One bucket of 4 Mi elements; further ones of its length cost nothing."""
    smaller, _ = grid.without(dead)
    plan_equal_ranges(maps_of(grid, hosts), maps_of(smaller, hosts), frozenset(smaller.ranks), BUCKET_ELEMENTS)


if __name__ == "__main__":
    main()
