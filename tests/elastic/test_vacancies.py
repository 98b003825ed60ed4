"""Which workers fill which vacancies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.protocol.vacancies import GridTarget, choose_part, fill, plan_moves
from parallel3d.parallel.grid import Grid, PartId
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import choose_plan
from parallel3d.pipeline.request import PlanRequest

FIRST = Grid.uniform(tp_size=2, pp_size=2, dp_size=2)  # stage 0: 0 1 | 2 3, stage 1: 4 5 | 6 7
WHOLE = GridTarget.of(FIRST)


def refill(dead: set[int], new: dict[int, PartId], hosts: dict[int, str] | None = None) -> Grid:
    left, spares = FIRST.without(dead)
    candidates = {rank: FIRST.part(rank) for rank in spares} | new
    return fill(left, target=WHOLE, candidates=candidates, hosts=hosts or {}, holders=FIRST)


@pytest.mark.parametrize(
    ("dead", "new", "stage", "replicas"),
    [
        ({0}, {}, 0, {1: (2, 3)}),  # a spare alone is not a replica
        ({0}, {8: (0, 0)}, 0, {0: (8, 1), 1: (2, 3)}),
        ({0}, {8: (0, 1)}, 0, {1: (2, 3)}),  # built the other part
        ({0}, {8: (1, 0)}, 0, {1: (2, 3)}),  # or another stage's
        ({0}, {9: (0, 0), 8: (0, 0)}, 0, {0: (8, 1), 1: (2, 3)}),
        ({0}, {8: (0, 0), 9: (0, 1)}, 0, {0: (8, 1), 1: (2, 3)}),  # holders of state come first
        ({0, 3}, {}, 0, {0: (2, 1)}),
        ({4, 5, 6, 7}, {8: (1, 1), 9: (1, 0)}, 1, {0: (9, 8)}),
    ],
)
def test_what_is_filled(dead: set[int], new: dict[int, PartId], stage: int, replicas: dict[int, tuple[int, ...]]):
    assert dict(refill(dead, new).stages[stage]) == replicas


def test_a_replica_is_on_one_host_unless_its_stage_has_no_other():
    hosts = {0: "a", 1: "a", 2: "b", 3: "b", 8: "c"}
    assert refill({0}, {8: (0, 0)}, hosts).stages[0].keys() == {1}
    assert refill({0}, {8: (0, 0), 9: (0, 0)}, {**hosts, 9: "a"}).tp_ranks((0, 0)) == (9, 1)
    assert refill({0, 3}, {}, hosts).tp_ranks((0, 0)) == (2, 1)


def test_a_replica_goes_where_its_stage_has_the_fewest():
    new = {8: (0, 0), 9: (0, 1), 10: (0, 0), 11: (0, 1)}
    hosts = {2: "a", 3: "a", 8: "a", 9: "a", 10: "b", 11: "b"}
    assert refill({0, 1}, new, hosts).tp_ranks((0, 0)) == (10, 11)


@pytest.mark.parametrize(
    ("dead", "built", "part"),
    [
        (set(), [], None),
        ({5}, [], (1, 1)),
        ({5}, [(1, 1)], None),
        ({5}, [(0, 1)], (1, 1)),
        ({0, 6, 7}, [], (0, 0)),
        ({0, 6, 7}, [(0, 0)], (1, 0)),
    ],
)
def test_the_part_that_a_new_worker_should_build(dead: set[int], built: list[PartId], part: PartId | None):
    grid, spares = FIRST.without(dead)
    assert next_part(grid, WHOLE, [*built, *(FIRST.part(rank) for rank in spares)]) == part


def next_part(grid: Grid, target: GridTarget, candidates: Iterable[PartId]) -> PartId | None:
    """What a new worker builds if all are on one host."""
    return choose_part(grid, target=target, candidates=[(part, "a") for part in candidates], host="a")


@pytest.mark.parametrize(
    ("dead", "candidates", "host", "part"),
    [
        ({0, 5}, [((0, 1), "a"), ((1, 0), "b")], "a", (0, 0)),
        ({0, 5}, [((0, 1), "a"), ((1, 0), "b")], "b", (1, 1)),  # completes what is there
        ({0, 5}, [((0, 1), "a"), ((1, 0), "b"), ((1, 1), "b")], "b", (0, 0)),  # on b, stage 0 is begun once more
        ({0}, [((0, 1), "a"), ((0, 0), "b")], "b", (0, 1)),
        ({0}, [((0, 1), "a"), ((0, 0), "b")], "c", (0, 0)),  # of no use to either
        ({0}, [((0, 1), "a"), ((0, 0), "a")], "b", None),
    ],
)
def test_a_new_worker_completes_a_replica_of_its_host(
    dead: set[int], candidates: list[tuple[PartId, str]], host: str, part: PartId | None
):
    grid, _ = FIRST.without(dead)
    assert choose_part(grid, target=WHOLE, candidates=candidates, host=host) == part


@given(dead=st.sets(st.sampled_from(FIRST.ranks)), data=st.data())
def test_new_workers_of_several_hosts_make_the_grid_whole(dead: set[int], data: st.DataObject):
    left, spares = FIRST.without(dead)
    host = st.sampled_from("ab")
    hosts = {rank: data.draw(host, label=f"host of {rank}") for rank in FIRST.ranks}
    parts = {rank: FIRST.part(rank) for rank in spares}
    while True:
        candidates, at = [(part, hosts[rank]) for rank, part in parts.items()], data.draw(host, label="next")
        if (part := choose_part(left, target=WHOLE, candidates=candidates, host=at)) is None:
            break
        assert len(parts) < 3 * len(FIRST.ranks)
        rank = len(FIRST.ranks) + len(parts)
        parts[rank], hosts[rank] = part, at
    whole = fill(left, target=WHOLE, candidates=parts, hosts=hosts, holders=FIRST)
    assert whole.replicas == FIRST.replicas


@given(dead=st.sets(st.sampled_from(FIRST.ranks)), data=st.data())
def test_whoever_builds_what_is_asked_for_makes_the_grid_whole(dead: set[int], data: st.DataObject):
    left, spares = FIRST.without(dead)
    candidates = {rank: FIRST.part(rank) for rank in spares}
    while (part := next_part(left, WHOLE, candidates.values())) is not None:
        candidates[8 + len(candidates)] = part
    whole = fill(left, target=WHOLE, candidates=candidates, hosts={}, holders=FIRST)
    assert whole.replicas == FIRST.replicas and all(whole.part(rank) == part for rank, part in candidates.items())
    order = data.draw(st.permutations(sorted(candidates)))
    shuffled = {rank: candidates[rank] for rank in order}
    assert fill(left, target=WHOLE, candidates=shuffled, hosts={}, holders=FIRST) == whole


@pytest.mark.parametrize(
    ("widths", "costs", "num_micro_batches", "stages"),
    [
        ([2, 2], [1, 1], 8, [1, 0, 1, 0]),
        ([2, 2], [3, 4], 8, [1, 0, 1, 0]),  # 12 16, then 12 12, 9 12, 9 8
        ([3, 3], [1, 3], 12, [1, 0]),
        ([2, 2], [1, 3], 12, [1, 1, 0, 0]),  # 6 18, then 6 12, 6 9
        ([1, 2], [1, 9], 8, [0, 1, 1, 0, 0]),  # a stage that could not lose a replica comes first
        ([4, 4], [1, 1], 8, []),
    ],
)
def test_new_workers_widen_the_stage_that_takes_longest(
    widths: list[int], costs: list[int], num_micro_batches: int, stages: list[int]
):
    grid = Grid.of_replicas(widths, tp_size=2)
    target = GridTarget.of(grid, max_replicas=4, costs=costs, num_micro_batches=num_micro_batches)
    candidates: dict[int, PartId] = {}
    filled = grid
    for stage in stages:
        for tp in (0, 1):
            part = next_part(filled, target, [(stage, 0)] * tp)
            assert part == (stage, tp)
            candidates[100 + len(candidates)] = part
        filled = fill(grid, target=target, candidates=candidates, hosts={}, holders=grid)
        assert all(filled.holds(rank) for rank in candidates)
    if len(stages) in (0, 4, 5):
        assert filled.replicas == ((0, 1, 2, 3),) * 2 and next_part(filled, target, []) is None


ONE = dict.fromkeys(range(20), "a")


@pytest.mark.parametrize(
    ("widths", "idle", "hosts", "moves"),
    [
        ((1, 1), {8: (0, 0)}, ONE, {}),  # one alone is not a replica
        ((1, 1), {8: (0, 0), 9: (1, 1)}, ONE, {9: (0, 1)}),
        ((2, 1), {8: (0, 0), 9: (1, 1)}, ONE, {8: (1, 0)}),  # the narrower stage gains more
        ((2, 2), {8: (0, 0), 9: (1, 1)}, ONE, {}),
        ((2, 1), {8: (0, 0), 9: (0, 0)}, ONE, {8: (1, 0), 9: (1, 1)}),
        ((1, 1), {8: (0, 1), 9: (0, 1), 10: (1, 1)}, ONE, {9: (0, 0)}),  # the first that have built one keep it
        ((1, 1), {8: (0, 0), 9: (1, 1)}, {8: "a", 9: "b"}, {}),  # not across hosts
        ((1, 1), {8: (1, 0), 9: (1, 1), 10: (0, 0), 11: (1, 1)}, {8: "a", 9: "a", 10: "b", 11: "b"}, {11: (0, 1)}),
        (
            (1, 1),  # a host without a replica of the stage, although two must build there
            {8: (1, 0), 9: (1, 0), 10: (0, 0), 11: (1, 1)},
            {0: "b", 1: "b", 8: "a", 9: "a", 10: "b", 11: "b"},
            {8: (0, 0), 9: (0, 1)},
        ),
    ],
)
def test_which_spares_build_another_part(
    widths: tuple[int, ...], idle: dict[int, PartId], hosts: dict[int, str], moves: dict[int, PartId]
):
    grid = Grid.of_replicas(widths, tp_size=2)
    assert plan_moves(grid, target=WHOLE, idle=idle, hosts=hosts) == moves


@given(dead=st.sets(st.sampled_from(FIRST.ranks), min_size=1), data=st.data())
def test_spares_that_build_what_they_are_asked_to_make_replicas_whole(dead: set[int], data: st.DataObject):
    left, spares = FIRST.without(dead)
    hosts = {rank: data.draw(st.sampled_from("ab"), label=f"host of {rank}") for rank in FIRST.ranks}

    def filled(parts: dict[int, PartId]) -> Grid:
        return fill(left, target=WHOLE, candidates=parts, hosts=hosts, holders=FIRST)

    parts = {rank: FIRST.part(rank) for rank in spares}
    while True:
        grid = filled(parts)
        idle = {rank: part for rank, part in parts.items() if not grid.holds(rank)}
        moves = plan_moves(grid, target=WHOLE, idle=idle, hosts=hosts)
        if not moves:
            break
        assert moves.keys() <= idle.keys() and all(parts[rank] != part for rank, part in moves.items())
        parts |= moves
        assert len(filled(parts).ranks) == len(grid.ranks) + FIRST.tp_size
    of_host = [sum(hosts[rank] == host for rank in idle) for host in "ab"]
    is_whole = all(map(len, grid.stages)) and grid.replicas == FIRST.replicas
    assert is_whole or max(of_host) < FIRST.tp_size


@pytest.mark.parametrize("costs", [(1, 1), (1, 2), (1, 1, 1), (1, 2, 1)])
@pytest.mark.parametrize("num_micro_batches", [8, 12])
def test_the_stage_that_is_widened_gains_most_in_the_planners_makespans(costs: tuple[int, ...], num_micro_batches: int):
    """The coordinator compares bounds, which take no time at any size. A grid that becomes a straight one is left out:
    it has the schedule's own order of computes, where others have the planner's."""
    times = StageCosts(forward=costs, backward_input=costs, backward_weight=costs)

    def makespan(widths: Sequence[int]) -> int:
        replicas = tuple(tuple(range(width)) for width in widths)
        request = PlanRequest(replicas=replicas, num_micro_batches=num_micro_batches, schedule="1f1b", costs=times)
        return choose_plan(request, may_split=True, max_extra_in_flight=2).makespan

    excess = []
    for widths in product((2, 3, 4), repeat=len(costs)):
        grid = Grid.of_replicas(widths, tp_size=1)
        target = GridTarget.of(grid, max_replicas=4, costs=costs, num_micro_batches=num_micro_batches)
        wider = [tuple(w + (at == stage) for at, w in enumerate(widths)) for stage in range(len(costs))]
        wider = [each for each in wider if max(each) <= 4]
        if len(wider) < 2 or any(len(set(each)) == 1 for each in wider):
            continue
        stage = min(range(len(costs)), key=lambda at: (widths[at] == 4, target.order(at, widths[at])))
        chosen = tuple(w + (at == stage) for at, w in enumerate(widths))
        excess.append(makespan(chosen) / min(map(makespan, wider)))
    assert excess and max(excess) <= 1.12 and mean(excess) <= 1.01, excess
