"""The grid: ranks and coordinates, in both orders, before and after losses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.parallel.grid import Coordinates, Grid

SIZE = st.integers(1, 4)
ORDER = st.sampled_from(["pp_dp_tp", "dp_pp_tp"])
COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
GRIDS = st.builds(Grid.of_replicas, COUNTS, tp_size=SIZE, order=ORDER)


def all_coordinates(grid):
    return [
        Coordinates(pp=p, dp=d, tp=t)
        for p, stage in enumerate(grid.replicas)
        for d in stage
        for t in range(len(grid.tp_ranks((p, d))))
    ]


@given(COUNTS, SIZE, ORDER)
def test_ranks_are_numbered_densely_and_once(counts, tp_size, order):
    grid = Grid.of_replicas(counts, tp_size=tp_size, order=order)
    assert grid.ranks == tuple(range(sum(counts) * tp_size))
    assert grid.replicas == tuple(tuple(range(count)) for count in counts)
    assert (grid.pp_size, grid.tp_size) == (len(counts), tp_size)


@given(GRIDS)
def test_coordinates_and_rank_of_are_inverse(grid):
    assert [grid.rank_of(grid.coordinates(rank)) for rank in grid.ranks] == list(grid.ranks)
    assert [grid.coordinates(grid.rank_of(coordinates)) for coordinates in all_coordinates(grid)] == all_coordinates(
        grid
    )
    assert not grid.holds(len(grid.ranks)) and all(map(grid.holds, grid.ranks))
    with pytest.raises(KeyError):
        grid.coordinates(-1)


@given(SIZE, SIZE, SIZE)
def test_pp_dp_tp_strides(tp_size, pp_size, dp_size):
    grid = Grid.uniform(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
    for coordinates in all_coordinates(grid):
        assert (
            grid.rank_of(coordinates) == coordinates.tp + coordinates.dp * tp_size + coordinates.pp * dp_size * tp_size
        )


@given(SIZE, SIZE, SIZE)
def test_dp_pp_tp_strides(tp_size, pp_size, dp_size):
    grid = Grid.uniform(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size, order="dp_pp_tp")
    for coordinates in all_coordinates(grid):
        assert (
            grid.rank_of(coordinates) == coordinates.tp + coordinates.pp * tp_size + coordinates.dp * pp_size * tp_size
        )


@given(COUNTS, SIZE)
def test_dp_pp_tp_numbers_a_whole_pipeline_before_the_next(counts, tp_size):
    grid = Grid.of_replicas(counts, tp_size=tp_size, order="dp_pp_tp")
    in_rank_order = [(c.dp, c.pp, c.tp) for c in map(grid.coordinates, grid.ranks)]
    assert in_rank_order == sorted(in_rank_order)


def test_hlats_example():
    """32 devices, TP = 8, PP = 4: DP = 1."""
    grid = Grid.uniform(tp_size=8, pp_size=4, dp_size=1)
    assert grid.groups()["tp"] == [tuple(range(8 * p, 8 * p + 8)) for p in range(4)]
    assert grid.groups()["dp"] == [(rank,) for rank in range(32)]
    assert grid.coordinates(19) == Coordinates(pp=2, dp=0, tp=3)


def test_two_by_two_by_two():
    grid = Grid.uniform(tp_size=2, pp_size=2, dp_size=2)
    assert grid.groups() == {
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "dp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "world": [(0, 1, 2, 3, 4, 5, 6, 7)],
    }
    pipes = [tuple(grid.rank_of(Coordinates(pp=p, dp=d, tp=t)) for p in (0, 1)) for d in (0, 1) for t in (0, 1)]
    assert pipes == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_uneven_stages():
    grid = Grid.of_replicas([1, 3, 2], tp_size=2)
    assert grid.groups()["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    assert grid.dp_ranks(0, 1) == (1,) and grid.dp_ranks(1, 1) == (3, 5, 7) and grid.dp_ranks(2, 0) == (8, 10)


@given(GRIDS)
def test_groups_of_a_kind_hold_every_rank_once(grid):
    for kind, groups in grid.groups().items():
        assert sorted(rank for group in groups for rank in group) == list(grid.ranks), kind


def test_the_picture_of_a_loss():
    grid, spares = Grid.uniform(tp_size=2, pp_size=2, dp_size=2).without([5])
    assert spares == (4,)
    assert grid.replicas == ((0, 1), (1,))
    assert grid.coordinates(6) == Coordinates(pp=1, dp=1, tp=0)  # the replica keeps its id
    assert grid.dp_ranks(1, 0) == (6,) and not grid.holds(4) and not grid.holds(5)
    assert str(grid.coordinates(7)) == "pp1 dp1 tp1" and grid.coordinates(7).replica == (1, 1)


@given(GRIDS, st.data())
def test_a_loss_takes_its_replica_and_nothing_else(grid, data):
    lost = data.draw(st.sets(st.sampled_from(grid.ranks)))
    hit = {grid.coordinates(rank).replica for rank in lost}
    left, spares = grid.without(lost)
    for p, stage in enumerate(grid.replicas):
        assert left.replicas[p] == tuple(d for d in stage if (p, d) not in hit)
        assert all(left.tp_ranks((p, d)) == grid.tp_ranks((p, d)) for d in left.replicas[p])
    expected = {rank for replica in hit for rank in grid.tp_ranks(replica)} - lost
    assert spares == tuple(sorted(expected))
    assert set(left.ranks) | set(spares) | lost == set(grid.ranks)
    assert left.stages_lost() == tuple(p for p, stage in enumerate(left.replicas) if not stage)


@given(GRIDS, st.data())
def test_losses_one_by_one_or_at_once_leave_the_same(grid, data):
    lost = data.draw(st.lists(st.sampled_from(grid.ranks), unique=True))
    step_by_step = grid
    for rank in lost:
        step_by_step, _ = step_by_step.without([rank])
    assert step_by_step == grid.without(lost)[0]


def test_a_stage_may_be_lost():
    grid, spares = Grid.of_replicas([2, 1], tp_size=2).without([5, 0])
    assert grid.stages_lost() == (1,) and spares == (1, 4) and grid.replicas == ((1,), ())
    assert Grid.of_replicas([2, 1], tp_size=2).stages_lost() == ()
