"""The groups of a grid: which rank makes which, under which names."""

import pytest

from parallel3d.parallel.grid import Grid
from parallel3d.parallel.groups import build_groups


class FakeGroup:
    def __init__(self, name, ranks):
        self.name, self.ranks, self.calls = name, ranks, []

    def abort(self):
        self.calls.append("abort")

    def close(self):
        self.calls.append("close")


def build(grid, rank, generation=0, tied=False):
    made = []

    def make(name, ranks):
        made.append(FakeGroup(name, ranks))
        return made[-1]

    return build_groups(grid, rank, generation, make, tied=tied), made


def test_the_groups_of_a_rank():
    groups, _ = build(Grid.uniform(tp_size=2, pp_size=2, dp_size=2), 6)
    assert (groups.tp.ranks, groups.dp.ranks, groups.world.ranks) == ((6, 7), (4, 6), tuple(range(8)))


def test_members_of_a_group_know_it_by_one_name_and_others_do_not():
    grid = Grid.of_replicas([1, 3, 2], tp_size=2)
    named = {}
    for rank in grid.ranks:
        for group in build(grid, rank)[1]:
            assert named.setdefault(group.name, group.ranks) == group.ranks
            assert rank in group.ranks
    kinds = grid.groups()
    assert sorted(named.values()) == sorted(ranks for kind in kinds.values() for ranks in kind)


@pytest.mark.parametrize("num_replicas", [[2, 2], [1, 3, 2]], ids=str)
def test_the_ranks_of_both_ends_have_a_group_if_they_share_an_embedding(num_replicas):
    grid = Grid.of_replicas(num_replicas, tp_size=2)
    for rank in grid.ranks:
        coordinates = grid.coordinates(rank)
        groups, made = build(grid, rank, tied=True)
        assert build(grid, rank)[0].embedding is None
        if coordinates.pp not in grid.embedding_stages:
            assert groups.embedding is None and len(made) == 3
            continue
        first, last = grid.dp_ranks(0, coordinates.tp), grid.dp_ranks(len(num_replicas) - 1, coordinates.tp)
        assert groups.tied is groups.embedding and groups.embedding.ranks == (*first, *last) == grid.embedding_ranks(
            coordinates.tp
        )
        names = {build(grid, other, tied=True)[0].embedding.name for other in groups.embedding.ranks}
        assert len(names) == 1 and {group.name for group in made} > names


def test_one_stage_is_both_ends_and_needs_no_further_group():
    groups, made = build(Grid.uniform(tp_size=2, pp_size=1, dp_size=2), 3, tied=True)
    assert groups.embedding is None and groups.tied is groups.dp and len(made) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_makes_the_kinds_in_the_same_order(tied):
    grid = Grid.uniform(tp_size=2, pp_size=3, dp_size=2)
    orders = {tuple(group.name.split("/")[1] for group in build(grid, rank, tied=tied)[1]) for rank in grid.ranks}
    longest = max(orders, key=len)
    assert all(order == tuple(kind for kind in longest if kind in order) for order in orders)


def test_generations_never_share_a_name():
    grid = Grid.uniform(tp_size=1, pp_size=2, dp_size=3)
    smaller, _ = grid.without([1])
    old = {group.name for rank in grid.ranks for group in build(grid, rank, generation=4)[1]}
    new = {group.name for rank in smaller.ranks for group in build(smaller, rank, generation=5)[1]}
    assert not old & new


def test_replicas_that_stay_keep_their_own_ranks_after_a_loss():
    smaller, _ = Grid.uniform(tp_size=2, pp_size=2, dp_size=2).without([5])
    groups, _ = build(smaller, 6, generation=1)
    assert (groups.tp.ranks, groups.dp.ranks, groups.world.ranks) == ((6, 7), (6,), (0, 1, 2, 3, 6, 7))


@pytest.mark.parametrize("tied, num_groups", [(False, 3), (True, 4)])
def test_what_is_asked_of_the_groups_is_asked_of_each(tied, num_groups):
    groups, made = build(Grid.uniform(tp_size=2, pp_size=2, dp_size=2), 0, tied=tied)
    groups.abort()
    groups.close()
    assert [group.calls for group in made] == [["abort", "close"]] * num_groups


def test_what_the_world_does_touches_neither_weights_nor_gradients():
    groups, _ = build(Grid.uniform(tp_size=2, pp_size=2, dp_size=2), 0, tied=True)
    others = [groups.tp, groups.dp, groups.embedding]
    for group in others:
        group.is_busy = False
    groups.world.is_busy = True
    assert not groups.is_busy
    for group in others:
        group.is_busy = True
        assert groups.is_busy
        group.is_busy = False
