"""How well a pipeline keeps up with slow replicas: planned, and run by the real executor over real sockets.

`python benchmarks/slow_replicas.py [--unit-ms 20] [--rounds 3]` takes 4 replicas, and pp4 x dp4, with 32 micro-batches;
some replicas need longer. As in reroute.py stages sleep instead of computing, and all else is real. For each grid it
prints the units of time of a step (a forward pass is one, a whole micro-batch three): with equal shares, with the plan
for the speeds, and without the slow replicas; the least possible; and the plan's time as it was measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reroute import MICRO_BATCHES, SLOTS, WIDTH, run
from parallel3d.pipeline.instructions import ReplicaId
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import Plan
from parallel3d.pipeline.request import NORMAL, PlanRequest
from parallel3d.pipeline.routes import fill_by_finish_time
from parallel3d.pipeline.slow_plan import choose_plan_for_slow, true_makespan

GRIDS: dict[str, tuple[int, dict[ReplicaId, float]]] = {
    "dp4, one at 1/2": (1, {(0, 3): 2.0}),
    "dp4, one at 1/4": (1, {(0, 3): 4.0}),
    "pp4 x dp4, one at 1/2": (4, {(1, 2): 2.0}),
    "pp4 x dp4, one at 1/3": (4, {(0, 3): 3.0}),
    "pp4 x dp4, two, at 1/2 and 2/3": (4, {(0, 0): 2.0, (3, 3): 1.5}),
}
"""Stages, and how much longer their slow replicas take."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Planned and measured makespans with slow replicas.")
    parser.add_argument("--unit-ms", type=float, default=20.0, help="length of a unit of work")
    parser.add_argument("--rounds", type=int, default=3, help="measured iterations of each grid")
    options = parser.parse_args()
    print("| grid | equal shares | by speed | without them | bound | measured / planned | plan |")
    print("|---|---|---|---|---|---|---|")
    for name, (num_stages, factors) in GRIDS.items():
        print_row(name, num_stages, factors, unit_s=options.unit_ms / 1e3, rounds=options.rounds)


def print_row(name: str, num_stages: int, factors: Mapping[ReplicaId, float], *, unit_s: float, rounds: int) -> None:
    request = build_request(num_stages, factors)
    plan, equal = choose(request), choose(replace(request, slowness=()))
    evicted = choose(build_request(num_stages, {}, lost=factors))
    planned = true_makespan(plan, request) / NORMAL
    measured = statistics.median(run(plan, [], unit_s, factors=factors) / unit_s for _ in range(rounds))
    print(
        f"| {name} | {true_makespan(equal, request) / NORMAL:g} | {planned:g} | {evicted.makespan} "
        f"| {bound(request):g} | {measured / planned:.3f} | {plan.request.routing} |",
        flush=True,
    )


def build_request(
    num_stages: int, factors: Mapping[ReplicaId, float], *, lost: Mapping[ReplicaId, float] | None = None
) -> PlanRequest:
    stages = [[(p, d) for d in range(WIDTH) if (p, d) not in (lost or {})] for p in range(num_stages)]
    return PlanRequest(
        replicas=tuple(tuple(d for _, d in stage) for stage in stages),
        num_micro_batches=MICRO_BATCHES,
        schedule="1f1b",
        costs=StageCosts.equal(num_stages),
        slots=SLOTS,
        slowness=tuple(tuple(round(NORMAL * factors.get(replica, 1.0)) for replica in stage) for stage in stages),
    )


def choose(request: PlanRequest) -> Plan:
    return choose_plan_for_slow(request, may_split=True, max_extra_in_flight=2)


def bound(request: PlanRequest) -> float:
    """The longest time of a stage: whole micro-batches, shared by speed, after a forward pass of each stage before it.

    No fill or drain is added: weight gradients of a split backward pass take that time.
    """
    times = []
    for stage, factors in enumerate(request.slowness):
        share = fill_by_finish_time(dict(enumerate(factors)), request.num_micro_batches)
        times.append(stage + 3 * max(share[replica] * factor for replica, factor in enumerate(factors)) / NORMAL)
    return max(times)


if __name__ == "__main__":
    main()
