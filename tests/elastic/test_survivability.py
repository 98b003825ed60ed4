"""Which losses a run survives, and what it says of those that it doesn't."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.protocol.survivability import Survivability, check_survivability, list_words
from parallel3d.optim.shard_map import plan_shard_map, plan_shard_maps
from parallel3d.parallel.grid import Grid

TP2 = Grid.uniform(tp_size=2, pp_size=2, dp_size=2)  # stage 1: replica 0 = 4 5, replica 1 = 6 7
DP4 = Grid.uniform(tp_size=1, pp_size=1, dp_size=4)


def decide(grid: Grid, dead: set[int], *, zero_stage: int = 1, zero_backups: int = 1, **settings) -> Survivability:
    return check_survivability(
        grid, zero_stage=zero_stage, zero_backups=zero_backups, dead=dead, **{"hosts": {}, **settings}
    )


@pytest.mark.parametrize(
    ("grid", "dead", "settings", "can_continue"),
    [
        (TP2, set(), {}, True),
        (TP2, {4}, {}, True),
        (TP2, {4, 5}, {}, True),
        (TP2, {0, 7}, {}, True),
        (TP2, {4, 7}, {}, False),  # two replicas, each with one rank left
        (TP2, {4}, {"zero_backups": 0}, False),
        (TP2, {4}, {"zero_backups": 0, "zero_stage": 0}, True),
        (TP2, {4}, {"zero_backups": 0, "fresh": True}, True),
        (TP2, {4, 7}, {"fresh": True}, False),
        (TP2, {4}, {"draining": {6}}, False),
        (DP4, {1, 3}, {}, True),
        (DP4, {0, 1}, {}, False),  # an owner and its backup
        (DP4, {0, 1}, {"fresh": True}, True),
        (DP4, {0, 1}, {"zero_stage": 0}, True),
        (DP4, {0}, {"draining": {1}}, True),  # who leaves hands over first
        (DP4, set(), {"draining": {0, 1, 2}, "zero_backups": 0}, True),
        (DP4, set(), {"draining": {0, 1, 2, 3}}, False),
        (DP4, {0, 2}, {"hosts": {0: "a", 1: "a", 2: "b", 3: "b"}}, False),  # backups stand two further
        (DP4, {0, 1}, {"hosts": {0: "a", 1: "a", 2: "b", 3: "b"}}, True),  # a host
    ],
)
def test_what_is_survived(grid: Grid, dead: set[int], settings: dict[str, object], can_continue: bool):
    assert decide(grid, dead, **settings).can_continue is can_continue


def test_a_lost_stage_names_every_lost_place():
    assert decide(TP2, {4, 7}).reason == (
        "stage 1 has no replica left: lost pp1 dp0 tp0 (rank 4) and pp1 dp1 tp1 (rank 7)"
    )
    assert decide(TP2, set(range(8))).reason.count("has no replica left") == 2


def test_a_lost_range_names_its_holders():
    assert decide(DP4, {2, 3}).reason == (
        "range 2 of the optimizer state of stage 0, tp 0 has no holder left: ranks 2 and 3 were lost"
    )
    assert decide(TP2, {5}, zero_backups=0).reason == (
        "range 0 of the optimizer state of stage 1, tp 1 has no holder left: "
        "rank 5, its only holder, was lost (elastic.zero_backups is 0)"
    )


def test_a_replica_keeps_its_name():
    grid = Grid((MappingProxyType({3: (6,)}),))
    assert decide(grid, {6}).reason == "stage 0 has no replica left: lost pp0 dp3 tp0 (rank 6)"


@st.composite
def losses(draw: st.DrawFn, max_size: int | None = None) -> tuple[Grid, set[int], dict[str, Any]]:
    """A grid, who is lost, and the settings of the optimizer's state."""
    num_replicas = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    grid = Grid.of_replicas(num_replicas, tp_size=draw(st.integers(1, 2)))
    dead = draw(st.sets(st.sampled_from(grid.ranks), max_size=max_size))
    hosts = {rank: str(draw(st.integers(0, 2))) for rank in grid.ranks}
    zero_stage, zero_backups = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    return grid, dead, {"zero_stage": zero_stage, "zero_backups": zero_backups, "hosts": hosts}


@given(st.data())
def test_what_remains_is_a_replica_of_each_stage_and_a_holder_of_each_range(data: st.DataObject):
    grid, dead, settings = data.draw(losses())
    survivability = decide(grid, dead, **settings)
    whole = all(any(dead.isdisjoint(ranks) for ranks in stage.values()) for stage in grid.stages)
    held = all(
        any(rank not in dead for rank in holders)
        for stage in range(grid.pp_size)
        for tp in range(grid.tp_size)
        for holders in plan_shard_map(grid, stage, tp, **settings).holders
    )
    assert survivability.can_continue == (whole and held)


@given(st.data())
def test_a_tied_embedding_makes_no_loss_fatal(data: st.DataObject):
    """Every survived loss leaves a holder of each of its ranges: the check need not consider them."""
    grid, dead, settings = data.draw(losses(max_size=4))
    if decide(grid, dead, **settings).can_continue:
        assert not any(
            plan_shard_maps(grid, 0, tp, **settings).embedding.lost_ranges(dead) for tp in range(grid.tp_size)
        )


def test_list_words():
    assert [list_words(range(count)) for count in (1, 2, 3)] == ["0", "0 and 1", "0, 1 and 2"]


@given(
    num_replicas=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    tp_size=st.integers(1, 2),
    settings=st.fixed_dictionaries({"zero_stage": st.integers(0, 1), "zero_backups": st.integers(0, 1)}),
    data=st.data(),
)
def test_only_the_ranges_of_the_dead_are_looked_at(
    num_replicas: list[int], tp_size: int, settings: dict[str, int], data: st.DataObject
):
    """The decision and its words are those of a search of every range of every stage."""
    grid = Grid.of_replicas(num_replicas, tp_size=tp_size)
    dead = data.draw(st.sets(st.sampled_from((*grid.ranks, 999))))
    hosts = {rank: str(data.draw(st.integers(0, 2))) for rank in grid.ranks}
    lost = [
        (stage, tp, number)
        for stage in range(grid.pp_size)
        for tp in range(tp_size)
        for number in plan_shard_map(grid, stage, tp, hosts=hosts, **settings).lost_ranges(dead)
    ]
    decision = decide(grid, dead, hosts=hosts, **settings)
    is_stage_lost = grid.without(dead)[0].stages_lost() != ()
    assert decision.can_continue is not (bool(lost) or is_stage_lost)
    if lost and not is_stage_lost:
        found = [part.split(" of the optimizer state of stage ") for part in decision.reason.split("; ")]
        assert [
            (int(rest[0]), int(rest.split("tp ")[1].split()[0]), int(part.split()[1])) for part, rest in found
        ] == lost
