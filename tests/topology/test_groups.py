"""A grid's groups: who makes which, under which names."""

from parallel3d.topology.grid import Grid
from parallel3d.topology.groups import build_groups


class FakeGroup:
    def __init__(self, name, ranks):
        self.name, self.ranks, self.calls = name, ranks, []

    def abandon(self):
        self.calls.append("abandon")

    def close(self):
        self.calls.append("close")


def build(grid, rank, epoch=0):
    made = []

    def make(name, ranks):
        made.append(FakeGroup(name, ranks))
        return made[-1]

    return build_groups(grid, rank, epoch, make), made


def test_the_groups_of_a_rank():
    groups, _ = build(Grid.straight(tp_size=2, pp_size=2, dp_size=2), 6)
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


def test_every_rank_makes_the_kinds_in_the_same_order():
    grid = Grid.straight(tp_size=2, pp_size=2, dp_size=2)
    orders = {tuple(group.name.split("/")[1] for group in build(grid, rank)[1]) for rank in grid.ranks}
    assert len(orders) == 1


def test_epochs_never_share_a_name():
    grid = Grid.straight(tp_size=1, pp_size=2, dp_size=3)
    smaller, _ = grid.without([1])
    old = {group.name for rank in grid.ranks for group in build(grid, rank, epoch=4)[1]}
    new = {group.name for rank in smaller.ranks for group in build(smaller, rank, epoch=5)[1]}
    assert not old & new


def test_replicas_that_stay_keep_their_own_ranks_after_a_loss():
    smaller, _ = Grid.straight(tp_size=2, pp_size=2, dp_size=2).without([5])
    groups, _ = build(smaller, 6, epoch=1)
    assert (groups.tp.ranks, groups.dp.ranks, groups.world.ranks) == ((6, 7), (6,), (0, 1, 2, 3, 6, 7))


def test_what_is_asked_of_the_groups_is_asked_of_each():
    groups, made = build(Grid.straight(tp_size=2, pp_size=1, dp_size=2), 0)
    groups.abandon()
    groups.close()
    assert [group.calls for group in made] == [["abandon", "close"]] * 3


def test_what_the_world_does_touches_neither_weights_nor_gradients():
    groups, _ = build(Grid.straight(tp_size=2, pp_size=1, dp_size=2), 0)
    groups.tp.is_busy, groups.dp.is_busy, groups.world.is_busy = False, False, True
    assert not groups.is_busy
    groups.dp.is_busy = True
    assert groups.is_busy
