"""The table of who handles which micro-batch."""

from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import choose_plan
from parallel3d.pipeline.request import PlanRequest
from parallel3d.pipeline.route_map import draw_route_map


def draw(replicas, first, num_micro_batches):
    request = PlanRequest(
        replicas=replicas, num_micro_batches=num_micro_batches, schedule="1f1b", costs=StageCosts.equal(len(replicas))
    )
    plan = choose_plan(request, may_split=True, max_extra_in_flight=2)
    return draw_route_map(plan.routes, replicas, first)


def test_a_whole_grid():
    assert draw(((0, 1), (0, 1)), ((0, 1), (0, 1)), 5).splitlines() == [
        "          replica 0   replica 1",
        "stage 0   0 2 4       1 3",
        "stage 1   0 2 4       1 3",
    ]


def test_orphans_are_marked_and_places_that_never_were_stay_empty():
    first = ((0, 1, 2), (0, 1, 2), (0, 1))
    assert draw(((0, 1, 2), (0, 2), (0, 1)), first, 6).splitlines() == [
        "          replica 0   replica 1   replica 2",
        "stage 0   0 3         1 4         2 5",
        "stage 1   0 3 +1      lost        2 5 +4",
        "stage 2   0 3 +2      1 4 +5",
    ]


def test_replicas_that_a_stage_has_gained_have_columns():
    assert draw(((0, 1), (0, 1, 2)), ((0, 1), (0, 1)), 6).splitlines() == [
        "          replica 0   replica 1   replica 2",
        "stage 0   0 3 +2      1 4 +5",
        "stage 1   0 3         1 4         2 5",
    ]


def test_what_does_not_fit_on_a_screen_is_left_out():
    ids = tuple(range(4))
    assert draw((ids, ids), (ids, ids), 400) == ""
