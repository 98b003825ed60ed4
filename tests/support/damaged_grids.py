"""Hypothesis strategies: grids after losses, and plans asked for on them."""

from hypothesis import strategies as st

from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.request import PlanRequest
from parallel3d.pipeline.schedules import default_schedule


def schedule_fields(schedule, num_chunks=1):
    """A request's fields for a schedule, or for "forward": evaluation by a schedule with that number of chunks."""
    if schedule != "forward":
        return {"schedule": schedule}
    return {"schedule": default_schedule(num_chunks), "has_backward": False}


@st.composite
def damaged_grids(draw, *, min_stages=1, max_stages=6, max_replicas=6):
    """Replicas by stage after losses: ids with gaps, at least one replica at every stage."""
    ids = st.lists(st.integers(0, max_replicas + 1), min_size=1, max_size=max_replicas, unique=True)
    return tuple(tuple(draw(ids)) for _ in range(draw(st.integers(min_stages, max_stages))))


@st.composite
def plan_requests(draw, *, grids, schedules, chunks=None, max_micro_batches=40, max_slots=4):
    """Anything that can be asked for on such a grid by one of these rules, with costs of 1 to 4."""
    num_chunks = 1 if chunks is None else draw(chunks)
    replicas, schedule = draw(grids), draw(st.sampled_from(schedules))
    costs = st.tuples(*[st.integers(1, 4)] * (len(replicas) * num_chunks))
    return PlanRequest(
        replicas=replicas,
        num_micro_batches=draw(st.integers(1, max_micro_batches)),
        **schedule_fields(schedule, num_chunks),
        virtual_stages=num_chunks,
        costs=StageCosts(forward=draw(costs), backward_input=draw(costs), backward_weight=draw(costs)),
        slots=draw(st.integers(1, max_slots)),
        split_backward=schedule != "forward" and draw(st.booleans()),
        extra_in_flight=draw(st.integers(0, 3)),
    )
