"""Times before which an iteration can't end, from the work of its replicas alone."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from parallel3d.pipeline.request import PlanRequest


def least_makespan(request: PlanRequest, loads: Iterable[tuple[int, int]]) -> int:
    """A lower bound for runs with these (stage, micro-batches of one of its replicas x its time factor)."""
    time_before = list(accumulate(request.costs.forward, initial=0))
    time_after, compute_time = min_time_after(request), request.compute_time
    return max(
        (time_before[request.layout.virtual_stages[stage][0]] + time_after[stage]) * request.time_scale
        + load * compute_time[stage]
        for stage, load in loads
    )


def min_time_after(request: PlanRequest) -> list[int]:
    """By stage, the least time after the end of its own work: the first chunk's backward comes last."""
    costs, virtual_stages = request.costs, request.layout.virtual_stages
    if not request.has_backward:
        return [sum(costs.forward[mine[-1] + 1 :]) for mine in virtual_stages]
    if request.splits:  # all halves for the weights may come after the last message
        return [0] * request.num_stages
    return [sum(costs.backward[: mine[0]]) for mine in virtual_stages]
