"""Measures planning times of whole grids and of the choice after losses. `python benchmarks/planner.py`"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import choose_plan
from parallel3d.pipeline.request import PlanRequest

ROUNDS = 5
NO_LOSS: list[tuple[int, int]] = []
TEN_LOST = [(lost % 8, 137 * lost) for lost in range(10)]
GRIDS = [
    # stages, replicas, micro-batches, lost (stage, replica)
    (2, 5, 40, [(1, 2)]),
    (5, 2, 16, [(1, 1)]),
    (4, 4, 32, [(1, 2)]),
    (4, 4, 32, [(1, 2), (2, 0)]),
    *((16, 64, m, lost) for lost in (NO_LOSS, [(5, 0)], [(0, 0), (8, 9), (15, 3)]) for m in (64, 1024, 4096)),
    # 100,096 workers with 8 tensor-parallel ranks a replica
    (8, 1564, 6256, TEN_LOST),
    (8, 1564, 12512, TEN_LOST),
]


def main() -> None:
    for num_stages, width, num_micro_batches, lost in GRIDS:
        replicas = tuple(tuple(d for d in range(width) if (p, d) not in lost) for p in range(num_stages))
        request = PlanRequest(
            replicas=replicas,
            num_micro_batches=num_micro_batches,
            schedule="1f1b",
            costs=StageCosts.equal(num_stages),
        )
        seconds = statistics.median(choice_s(request) for _ in range(ROUNDS))
        print(
            f"{num_stages} stages x {width} replicas, {num_micro_batches} micro-batches, {len(lost)} lost: "
            f"{1e3 * seconds:,.1f} ms (median of {ROUNDS})"
        )


def choice_s(request: PlanRequest) -> float:
    """Seconds of one choice with all candidates of the default configuration, its lists included."""
    started = time.perf_counter()
    choose_plan(request, may_split=True, max_extra_in_flight=2)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
