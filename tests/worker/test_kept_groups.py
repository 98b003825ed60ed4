"""Which groups a rank keeps over a change of membership: all members decide alike, by what all have said."""

import pytest

from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.worker.kept_groups import KeptGroups

GRID = Grid.uniform(tp_size=2, pp_size=2, dp_size=2)
NAME = "generation3/dp/stage0/tp1"


class LeftGroup:
    """A group of the last generation."""

    def __init__(self, state, ranks=(1, 3)):
        self.name, self.ranks, self.state, self.token = "generation1/dp/stage0/tp1", ranks, state, None

    def renew(self, name, token):
        self.name, self.token = name, token


class Statements:
    """A store in which the other member has spoken."""

    def __init__(self, other):
        self.values = {f"{NAME}/state/1": other.encode()}

    def set(self, key, value):
        self.values[key] = value

    def get_all(self, keys, token):
        return [self.values[key] for key in keys]


def take(own, other, *, ranks=(1, 3), previous=GRID):
    store, token = Statements(other), AbortToken()
    former = [] if own is None else [own]
    return KeptGroups(former, previous, store, token).take(NAME, ranks, 0), store, token


def test_a_group_in_the_same_state_everywhere_is_kept_under_its_new_name():
    group = LeftGroup("generation0: 7")
    taken, _, token = take(group, "generation0: 7")
    assert taken is group and (group.name, group.token) == (NAME, token)


@pytest.mark.parametrize(
    "own, other",
    [
        (LeftGroup("generation0: 7"), "generation0: 8"),  # the other one is one collective further
        (LeftGroup("generation0: 7"), "generation1: 7"),  # and has another group
        (LeftGroup("generation0: 7"), ""),
        (LeftGroup(""), "generation0: 7"),
        (LeftGroup(""), ""),
        (None, "generation0: 7"),
        (None, ""),
    ],
)
def test_it_is_built_again_where_one_member_can_not_keep_it(own, other):
    taken, store, _ = take(own, other)
    assert taken is None and (own is None or own.token is None)
    assert store.values[f"{NAME}/state/0"] == (b"" if own is None else own.state.encode()), "the other one waits for it"


@pytest.mark.parametrize("ranks, previous", [((1, 5), GRID), ((1, 3), None)])
def test_groups_of_other_members_are_not_compared(ranks, previous):
    taken, store, _ = take(LeftGroup("generation0: 7", ranks), "generation0: 7", ranks=ranks, previous=previous)
    assert taken is None and len(store.values) == 1
