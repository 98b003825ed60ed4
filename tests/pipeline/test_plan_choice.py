"""The choice of a plan after a loss: the best of its candidates, close to the bound, and with a reason."""

from dataclasses import replace
from random import Random
from time import perf_counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parallel3d.pipeline.check import check_plan
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import complete_candidates, plan_pipeline
from tests.support.damaged_grids import damaged_grids, plan_requests
from tests.support.plan_requests import choose, lose, make_request, straight_grids
from tests.support.tiers import examples


def fastest(request):
    """A lower bound: the busiest stage's work, and the time until the first micro-batch reaches the last stage."""
    compute_time = [
        -(-request.num_micro_batches // len(ids)) * cost for ids, cost in zip(request.replicas, request.costs.total)
    ]
    return max(compute_time) + sum(request.costs.forward[:-1])


def makespan_of(plan, name):
    return next(candidate.makespan for candidate in plan.candidates if candidate.name == name)


@pytest.mark.parametrize(
    ("lost", "chosen", "dropping", "name"),
    [
        ([(1, 2)], 34, 42, "reroute, split backward, +2 in flight"),
        ([(0, 2)], 34, 42, "reroute, split backward, +2 in flight"),
        ([(3, 2)], 36, 42, "reroute, split backward"),
        ([(1, 2), (1, 3)], 49, 57, "reroute, split backward, +2 in flight"),
        ([(1, 2), (2, 0)], 36, 57, "reroute, split backward, +1 in flight"),
        ([(1, 2), (3, 0)], 37, 57, "reroute, split backward, +1 in flight"),
        ([(1, 2), (2, 0), (3, 1)], 37, 105, "reroute, split backward, +1 in flight"),
    ],
)
def test_pp4_dp4_after_losses(lost, chosen, dropping, name):
    """One whole backward a micro-batch, 3 units, 11 of them where a replica is missing: 33 is the least."""
    plan = complete_candidates(choose(make_request(lose(4, 4, *lost), 32)))
    assert (plan.makespan, makespan_of(plan, "drop")) == (chosen, dropping)
    assert makespan_of(plan, name) == chosen and name in plan.reason
    assert plan.makespan <= 1.05 * fastest(plan.request)
    check_plan(plan, slots=3)


@pytest.mark.pairwise("num_losses", "num_stages", "width")
@pytest.mark.parametrize(("num_stages", "width", "num_micro_batches"), [(4, 4, 32), (4, 8, 64), (8, 8, 64), (2, 5, 40)])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_losses", [1, 2, 3])
def test_the_choice_is_near_the_least_there_can_be(num_stages, width, num_micro_batches, num_losses, seed):
    generator = Random(seed)
    replicas = [(stage, replica) for stage in range(num_stages) for replica in range(width)]
    request = make_request(lose(num_stages, width, *generator.sample(replicas, num_losses)), num_micro_batches)
    if request.is_straight:  # a whole pipeline was lost: the textbook's lists again
        return
    plan = choose(request)
    assert plan.makespan <= 1.05 * fastest(plan.request), plan.reason


@settings(max_examples=examples(150))
@given(
    plan_requests(grids=damaged_grids(), schedules=["1f1b", "gpipe", "zb-h1", "forward"], max_slots=3),
    st.booleans(),
)
def test_the_choice_is_the_best_of_its_table(drawn, may_split):
    extra, slots = min(drawn.extra_in_flight, 2), drawn.slots
    request = replace(drawn, split_backward=False, extra_in_flight=0)
    assume(not request.is_straight)
    limits = {"may_split": may_split, "max_extra_in_flight": extra}
    plan = choose(request, **limits)
    table = complete_candidates(plan).candidates
    check_plan(plan, slots)
    assert not any(candidate.is_lower_bound for candidate in table)
    assert len(table) == len({candidate.request for candidate in table})
    best = min(table, key=lambda c: (c.makespan, c.request.extra_in_flight, c.request.split_backward, c.name))
    if best.request.routing != plan.request.routing:  # reroute goes before drop, against the alphabet
        best = next(c for c in table if c.name == best.name.replace("drop", "reroute"))
    assert (plan.request, plan.makespan) == (best.request, best.makespan)
    assert plan.makespan == plan_pipeline(plan.request).makespan
    for quick, whole in zip(plan.candidates, table):
        assert quick.request == whole.request
        assert quick == whole or plan.makespan <= quick.makespan <= whole.makespan
    assert plan.request.split_backward <= may_split and plan.request.extra_in_flight <= extra
    if request.whole_pipelines:
        assert plan.makespan <= plan_pipeline(replace(request, routing="drop")).makespan


@given(straight_grids, st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.data())
def test_a_straight_grid_has_nothing_to_choose(grid, schedule, data):
    """Whatever its stages cost: the lists of equal costs, which are the textbook's."""
    num_stages, width, num_micro_batches, _ = grid
    costs = st.tuples(*[st.integers(1, 24)] * num_stages)
    replicas = (tuple(range(3, 3 + width)),) * num_stages  # as when whole pipelines were lost
    request = make_request(replicas, num_micro_batches, schedule=schedule)
    drawn = StageCosts(forward=data.draw(costs), backward_input=data.draw(costs), backward_weight=data.draw(costs))
    plan = choose(replace(request, costs=drawn))
    assert plan.candidates == ()
    assert dict(plan.lists) == dict(plan_pipeline(request).lists)


def test_dropping_gives_no_work_to_pipelines_that_lost_a_replica():
    plan = plan_pipeline(make_request(lose(3, 4, (1, 2)), 12, routing="drop"))
    check_plan(plan, slots=3)
    assert {replica for replica, steps in plan.lists.items() if not steps} == {(0, 2), (2, 2)}
    assert plan.lists[0, 3] == tuple(step for step in plan.lists[0, 3] if step.micro_batch % 3 == 2)
    assert set(plan.routes) == {(0, 0, 0), (1, 1, 1), (3, 3, 3)}


def test_where_no_pipeline_is_whole_there_is_nothing_to_drop():
    plan = choose(make_request(((0,), (1,)), 4))
    assert {candidate.request.routing for candidate in plan.candidates} == {"reroute"}


def test_the_reason_says_what_was_chosen_and_what_the_other_way_takes():
    plan = choose(make_request(lose(4, 4, (1, 2)), 32))
    chosen = "chosen of 12: reroute, split backward, +2 in flight; the best to drop takes"
    assert plan.reason.endswith(f"{chosen} at least 36")
    assert complete_candidates(plan).reason.endswith(f"{chosen} 36")


def test_a_choice_for_ten_ranks_is_quick():
    """It stands in the path of recovery, on every worker at once. 2 to 5 ms when written; here for gross mistakes."""
    requests = [make_request(lose(5, 2, (1, 1)), 16), make_request(lose(2, 5, (1, 2)), 40)]
    for request in requests:
        seconds = []
        for _ in range(5):
            started = perf_counter()
            choose(request)
            seconds.append(perf_counter() - started)
        assert min(seconds) < 0.05


def test_uneven_stages_by_hand_are_chosen_for_like_losses():
    """As 4 stages x 3 replicas that lost one: 20 units, of which 18 are work; the rule as written takes 27."""
    request = make_request(((0, 1, 2), (0, 1, 2), (0, 1), (0, 1, 2)), 12)
    plan = choose(request)
    assert (plan.makespan, max(plan.busy.values()), plan_pipeline(request).makespan) == (20, 18, 27)
