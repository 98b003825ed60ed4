"""The tree of a reduction: its shape, and all orders in which its messages can travel while ranks die."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.parallel.tree_place import tree_place

sizes = st.integers(1, 40) | st.integers(1000, 12_000)


@given(sizes, st.data())
def test_neighbours_know_each_other_and_the_way_up_is_short(size, data):
    number = data.draw(st.integers(0, size - 1))
    place = tree_place(number, size)
    assert len(place.children) <= 2
    assert all(tree_place(child, size).parent == number for child in place.children)
    depth, at = 0, number
    while (parent := tree_place(at, size).parent) is not None:
        assert parent < at and at in tree_place(parent, size).children
        depth, at = depth + 1, parent
    assert at == 0 and depth <= size.bit_length()


@pytest.mark.parametrize("size", [*range(1, 20), 1000])
def test_a_subtree_is_a_range_of_ranks(size):
    below = {number: {number} for number in range(size)}
    for number in reversed(range(1, size)):
        below[tree_place(number, size).parent] |= below[number]
    assert all(found == set(range(number, number + len(found))) for number, found in below.items())
    assert len(below[0]) == size


# --- every order of messages and deaths -------------------------------------------------------------------------------
# A world: for each rank how many of its steps it has made, who is dead, which sums are on their way or were received.


def steps_of(number, size):
    """The messages of a rank in one collective, in its order: ("get" | "put", direction, peer)."""
    place = tree_place(number, size)
    up = [("get", "up", child) for child in place.children]
    down = [("put", "down", child) for child in place.children]
    if place.parent is None:
        return [*up, *down]
    return [*up, ("put", "up", place.parent), ("get", "down", place.parent), *down]


def explore(size, *, deaths, forward=lambda held: held):
    """Visits all worlds; `forward` may corrupt what a rank sends on. Returns who held a result and who lived when
    nothing more could happen, and checks that a rank with a result has the part of every rank exactly once."""
    steps = [steps_of(number, size) for number in range(size)]
    everyone = frozenset(range(size))
    start = ((0,) * size, tuple(frozenset([n]) for n in range(size)), frozenset(), frozenset())
    ends, seen, stack = set(), {start}, [start]
    while stack:
        at, held, wire, dead = world = stack.pop()
        nexts = []
        for n in set(range(size)) - dead:
            if at[n] < len(steps[n]):
                nexts += _step(world, n, steps[n][at[n]], forward)
            if len(dead) < deaths:
                nexts.append((at, held, wire, dead | {n}))
        done = frozenset(n for n in range(size) if held[n] == everyone and _has_result(at[n], steps[n]))
        for n in range(size):
            assert at[n] < len(steps[n]) or held[n] == everyone, f"rank {n} returns {sorted(held[n])}"
        if not any(made[0] != at for made in nexts):
            assert dead or len(done) == size, "a collective without deaths has stopped"
            ends.add((done - dead, everyone - dead))
        for made in nexts:
            if made not in seen:
                seen.add(made)
                stack.append(made)
    return ends


def _step(world, n, step, forward):
    at, held, wire, dead = world
    action, direction, peer = step
    later = (*at[:n], at[n] + 1, *at[n + 1 :])
    if action == "put":
        return [(later, held, wire | {(n, peer, direction, forward(held[n]))}, dead)]
    found = next((each for each in wire if each[:3] == (peer, n, direction)), None)
    if found is None:
        return []
    if direction == "up":
        assert not held[n] & found[3], "a part is counted twice"
    got = held[n] | found[3] if direction == "up" else found[3]
    return [(later, (*held[:n], got, *held[n + 1 :]), wire - {found}, dead)]


def _has_result(position, steps):
    return all(direction == "down" and action == "put" for action, direction, _ in steps[position:])


@pytest.mark.parametrize("size, deaths", [(1, 1), (2, 2), (3, 2), (4, 2), (5, 1), (6, 1)])
def test_a_result_is_the_whole_sum_whichever_ranks_die(size, deaths):
    ends = explore(size, deaths=deaths)
    everyone = frozenset(range(size))
    assert (everyone, everyone) in ends
    assert size < 3 or any(holders and holders < live for holders, live in ends)  # its neighbour does not hold the sum


def test_the_exploration_finds_a_partial_sum():
    with pytest.raises(AssertionError, match="returns"):
        explore(3, deaths=0, forward=lambda held: frozenset(list(held)[:1]))
