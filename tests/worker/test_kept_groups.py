"""Which groups a rank keeps over a change of membership: all members decide alike, by what all have said."""

import threading
from types import SimpleNamespace

import pytest

from parallel3d.elastic.coordinator.kv_store import KeyValueStore
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.worker.kept_groups import KeptGroups, unchanged_groups

GRID = Grid.uniform(tp_size=2, pp_size=2, dp_size=2)
SMALLER = GRID.without([4])[0]
"""Without the ranks 4 and 5: the groups of ranks 0 to 3 and 6, 7 are as before, but for those with these two."""
STAGE, LOST = GRID.coordinates(4).pp, GRID.coordinates(4).dp
OTHER = 1 - STAGE
DP = GRID.dp_ranks(OTHER, 1)
NAME = f"generation3/dp/stage{OTHER}/tp1"


class LeftGroup:
    """A group of the last generation."""

    def __init__(self, state, ranks=DP, name=f"generation1/dp/stage{OTHER}/tp1"):
        self.name, self.ranks, self.state, self.token = name, ranks, state, None

    def renew(self, name, token):
        self.name, self.token = name, token


class Controls:
    """The control channels of all ranks of a grid, to one store."""

    def __init__(self):
        self.said = {}
        self.store = KeyValueStore({}, self._answer)
        self._answers = {}
        self._came = threading.Condition()

    def of(self, rank):
        return SimpleNamespace(rank=rank, compare=lambda *arguments: self._compare(rank, *arguments))

    def _compare(self, rank, key, num_workers, states, token):
        self.said[rank] = states
        header = {"op": "compare", "key": key, "size": num_workers, "numbers": list(states)}
        with self._came:
            self.store.handle(SimpleNamespace(rank=rank), {**header, "states": list(states.values())}, b"")
            assert self._came.wait_for(lambda: rank in self._answers, 300)
        return self._answers[rank]

    def _answer(self, connections, header, payload):
        for each in connections:
            self._answers[each.rank] = int.from_bytes(payload, "little")
        self._came.notify_all()


def record_of(previous, grid=SMALLER):
    return GenerationRecord(generation=3, grid=grid, previous=previous, members=grid.ranks)


def take(former, *, previous=GRID, grid=SMALLER, name=NAME, ranks=DP):
    """All ranks of the grid take their groups, as build_groups does; returns what the members of `ranks` got."""
    controls, taken = Controls(), {}

    def build(rank):
        kept = KeptGroups(former.get(rank, []), record_of(previous, grid), controls.of(rank), AbortToken())
        assert kept.take("generation3/world", grid.ranks) is None
        taken[rank] = kept.take(name, ranks)

    threads = [threading.Thread(target=build, args=(rank,)) for rank in grid.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [taken[rank] for rank in ranks], controls


def test_a_group_in_the_same_state_everywhere_is_kept_under_its_new_name():
    groups = {rank: LeftGroup("generation0: 7") for rank in DP}
    taken, controls = take({rank: [group] for rank, group in groups.items()})
    assert taken == list(groups.values())
    assert all(group.name == NAME and group.token is not None for group in taken)
    assert sorted(controls.said) == list(SMALLER.ranks), "each rank says it once, whatever its groups"


@pytest.mark.parametrize(
    "own, other",
    [
        (LeftGroup("generation0: 7"), LeftGroup("generation0: 8")),  # the other one is one collective further
        (LeftGroup("generation0: 7"), LeftGroup("generation1: 7")),  # and has another group
        (LeftGroup("generation0: 7"), LeftGroup("generation0: 7", name="generation1/dp/stage9/tp1")),
        (LeftGroup("generation0: 7"), LeftGroup("")),
        (LeftGroup(""), LeftGroup("")),
        (None, LeftGroup("generation0: 7")),
        (None, None),
    ],
)
def test_it_is_built_again_where_one_member_can_not_keep_it(own, other):
    former = {rank: [group] for rank, group in zip(DP, (own, other)) if group}
    taken, _ = take(former)
    assert taken == [None, None] and all(group.token is None for group in (own, other) if group)


def test_groups_of_other_members_are_not_compared():
    ranks = GRID.dp_ranks(STAGE, 1)
    left = {rank: [LeftGroup("generation0: 7", ranks)] for rank in ranks}
    assert ranks not in unchanged_groups(GRID, SMALLER)
    kept = tuple(rank for rank in ranks if SMALLER.holds(rank))
    taken, _ = take(left, ranks=kept)
    assert taken == [None] * len(kept)


def test_without_an_unchanged_group_nobody_waits():
    for previous in (None, Grid.uniform(tp_size=1, pp_size=1, dp_size=4)):
        kept = KeptGroups([LeftGroup("generation0: 7")], record_of(previous), None, AbortToken())
        assert kept.take("generation3/world", SMALLER.ranks) is None and kept.take(NAME, DP) is None


def test_a_group_of_all_ranks_does_not_pass_for_the_group_of_the_world():
    """On one stage without tensor parallelism both have the same ranks."""
    grid = Grid.uniform(tp_size=1, pp_size=1, dp_size=2)
    groups = {rank: LeftGroup("generation0: 7", (0, 1), "generation1/dp/stage0/tp0") for rank in (0, 1)}
    world = {rank: LeftGroup("generation0: 9", (0, 1), "generation1/world") for rank in (0, 1)}
    former = {rank: [groups[rank], world[rank]] for rank in (0, 1)}
    taken, _ = take(former, previous=grid, grid=grid, name="generation3/dp/stage0/tp0", ranks=(0, 1))
    assert taken == list(groups.values()) and world[0].token is None


def test_the_groups_that_ranks_compare_have_the_same_numbers_on_all():
    unchanged = unchanged_groups(GRID, SMALLER)
    assert sorted(unchanged.values()) == list(range(len(unchanged)))
    assert set(unchanged) == {
        *(GRID.dp_ranks(OTHER, tp) for tp in (0, 1)),
        *(GRID.tp_ranks((stage, dp)) for stage in (0, 1) for dp in (0, 1) if (stage, dp) != (STAGE, LOST)),
    }
