"""Plan requests for the tests of the planner: grids with and without losses, and the choice for them."""

from __future__ import annotations

from hypothesis import strategies as st

from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import choose_plan
from parallel3d.pipeline.request import PlanRequest
from tests.support.damaged_grids import schedule_fields


def make_request(replicas, num_micro_batches, *, schedule="1f1b", forward=1, backward=(1, 1), **options):
    of_input, of_weight = backward
    num_stages = len(replicas)
    costs = StageCosts(
        forward=(forward,) * num_stages,
        backward_input=(of_input,) * num_stages,
        backward_weight=(of_weight,) * num_stages,
    )
    return PlanRequest(
        replicas=replicas, num_micro_batches=num_micro_batches, costs=costs, **schedule_fields(schedule), **options
    )


def lose(num_stages, width, *lost):
    """A grid without the lost (stage, replica)."""
    return tuple(tuple(d for d in range(width) if (p, d) not in lost) for p in range(num_stages))


def choose(request, *, may_split=True, max_extra_in_flight=2):
    return choose_plan(request, may_split=may_split, max_extra_in_flight=max_extra_in_flight)


straight_grids = st.tuples(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 40), st.sampled_from([(1, (1, 1)), (2, (1, 1))])
)
