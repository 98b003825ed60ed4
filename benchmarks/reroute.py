"""How well a damaged pipeline keeps up: simulated, and run by the real executor over real sockets.

`python benchmarks/reroute.py [--unit-ms 20] [--rounds 3]` takes pp4 x dp4 with 32 micro-batches and loses one, two and
three replicas. A machine with fewer cores than replicas can't compute all stages at once, so here they sleep: a stage's
forward, and each half of its backward, takes one unit of time. All else is real: the instruction lists, the executor,
autograd, deferred weight gradients, messages over sockets with their slots. Measured is the time from the first
instruction of any replica to the last of all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sleeping import HIDDEN, SleepingStage
from parallel3d.layers.gradient_sink import GradientSink, WeightGradStore
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.p2p_sockets import SocketLinks, open_listener
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.pipeline.executor import Executor, LoadedMicroBatch
from parallel3d.pipeline.instructions import ReplicaId
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import Plan, choose_plan, complete_candidates
from parallel3d.pipeline.request import PlanRequest

STAGES, WIDTH, MICRO_BATCHES, SLOTS = 4, 4, 32, 3
NO_FACTORS: Mapping[ReplicaId, float] = {}
LOSSES: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "1": [(1, 2)],
    "2, one stage": [(1, 2), (1, 0)],
    "2, two stages": [(1, 2), (3, 0)],
    "3, one stage": [(1, 2), (1, 0), (1, 3)],
    "3, three stages": [(0, 1), (1, 2), (3, 0)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated and measured makespans after losses.")
    parser.add_argument("--unit-ms", type=float, default=20.0, help="length of a unit of work")
    parser.add_argument("--rounds", type=int, default=3, help="measured iterations of each grid")
    options = parser.parse_args()
    print("| lost | bound | dropping | chosen | 1F1B reroute | measured / simulated | throughput kept | plan |")
    print("|---|---|---|---|---|---|---|---|")
    uniform = plan_without([]).makespan
    for name, lost in LOSSES.items():
        print_row(name, lost, uniform, unit_s=options.unit_ms / 1e3, rounds=options.rounds)


def print_row(name: str, lost: Sequence[tuple[int, int]], uniform: int, *, unit_s: float, rounds: int) -> None:
    plan = plan_without(lost)
    measured = statistics.median(run(plan, lost, unit_s) / unit_s for _ in range(rounds))
    by_name = {candidate.name: candidate for candidate in plan.candidates}
    dropping = [c.makespan for c in plan.candidates if c.request.routing == "drop" and not c.is_lower_bound]
    plain = [
        c.makespan
        for c in by_name.values()
        if c.request.routing == "reroute" and not c.request.split_backward and not c.request.extra_in_flight
    ]
    chosen = next((c.name for c in plan.candidates if c.request == plan.request), "textbook")
    print(
        f"| {name} | {bound(lost)} | {min(dropping, default='-')} | {plan.makespan} | {min(plain, default='-')} | "
        f"{measured / plan.makespan:.3f} | {uniform / plan.makespan:.2f} | {chosen} |",
        flush=True,
    )


def replicas_without(lost: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(d for d in range(WIDTH) if (p, d) not in lost) for p in range(STAGES))


def bound(lost: Sequence[tuple[int, int]]) -> int:
    """The narrowest stage's share of micro-batches, three units each, and the way of the first and last one."""
    narrowest = min(map(len, replicas_without(lost)))
    return ceil(MICRO_BATCHES / narrowest) * 3 + 3 * (STAGES - 1)


def plan_without(lost: Sequence[tuple[int, int]]) -> Plan:
    request = PlanRequest(
        replicas=replicas_without(lost),
        num_micro_batches=MICRO_BATCHES,
        schedule="1f1b",
        costs=StageCosts.equal(STAGES),
        slots=SLOTS,
    )
    return complete_candidates(choose_plan(request, may_split=True, max_extra_in_flight=2))


def run(
    plan: Plan, lost: Sequence[ReplicaId], unit_s: float, *, factors: Mapping[ReplicaId, float] = NO_FACTORS
) -> float:
    """Seconds of one iteration, every replica a thread with its own sockets; slow ones take `factors` as long."""
    full = Grid.uniform(tp_size=1, pp_size=len(plan.request.replicas), dp_size=WIDTH)
    grid, _ = full.without(full.stages[p][d][0] for p, d in lost)
    listeners = {rank: open_listener("127.0.0.1") for rank in grid.ranks}
    addresses = {rank: listener.getsockname() for rank, listener in listeners.items()}
    ready, ends, token = threading.Barrier(len(grid.ranks) + 1), [], AbortToken()
    batch = BatchPlan(seed=0, iteration=1, num_micro_batches=MICRO_BATCHES, micro_batch_size=1, sequence_length=4)

    def work(rank: int) -> None:
        links = SocketLinks(
            secret=b"a secret of a benchmark's own...",
            rank=rank,
            generation=0,
            listener=listeners[rank],
            address_of=lambda peer: addresses[peer],
            slots=SLOTS,
            token=token,
            timeout_s=60.0,
        )
        replica = grid.coordinates(rank).replica
        executor = build_executor(plan, grid, rank, links, token, unit_s * factors.get(replica, 1.0))
        tokens = torch.zeros(4, dtype=torch.int64)
        ready.wait(60.0)
        executor.run(plan.lists[replica], batch, lambda micro: LoadedMicroBatch(tokens, tokens))
        ends.append(time.perf_counter())
        links.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in grid.ranks]
    for thread in threads:
        thread.start()
    ready.wait(60.0)
    started = time.perf_counter()
    for thread in threads:
        thread.join(600.0)
    return max(ends) - started


def build_executor(plan: Plan, grid: Grid, rank: int, links: SocketLinks, token: AbortToken, unit_s: float) -> Executor:
    stage, weight_grads = grid.coordinates(rank).pp, WeightGradStore()
    chunk = SleepingStage("weight", is_first=stage == 0, is_last=stage == grid.pp_size - 1, seconds=unit_s)
    chunk.weight.attach(GradientSink.with_own_buffer(chunk.weight, weight_grads=weight_grads))
    return Executor(
        chunks=[chunk],
        layout=plan.request.layout,
        grid=grid,
        rank=rank,
        generation=0,
        links=links,
        tp=solo_region(),
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        token=token,
        weight_grads=weight_grads,
    )


if __name__ == "__main__":
    main()
