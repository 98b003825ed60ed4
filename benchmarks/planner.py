"""How long a plan takes: 64 replicas x 16 stages, whole and with one replica missing. `python benchmarks/planner.py`"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.pipeline.planner import PlanRequest, plan_pipeline  # noqa: E402

NUM_STAGES, NUM_REPLICAS, ROUNDS = 16, 64, 3


def main() -> None:
    whole = (tuple(range(NUM_REPLICAS)),) * NUM_STAGES
    damaged = (*whole[:5], tuple(range(1, NUM_REPLICAS)), *whole[6:])
    for name, replicas in (("whole", whole), ("one replica missing", damaged)):
        for num_micro_batches in (64, 64 * NUM_REPLICAS):
            seconds = statistics.median(plan_s(replicas, num_micro_batches) for _ in range(ROUNDS))
            print(f"{name}, {num_micro_batches} micro-batches: {seconds:.3f} s (median of {ROUNDS})")


def plan_s(replicas: tuple[tuple[int, ...], ...], num_micro_batches: int) -> float:
    request = PlanRequest(
        replicas=replicas,
        num_micro_batches=num_micro_batches,
        rule="1f1b",
        forward_costs=(1,) * NUM_STAGES,
        backward_costs=(2,) * NUM_STAGES,
    )
    started = time.perf_counter()
    plan_pipeline(request)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
