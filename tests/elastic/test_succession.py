"""Who inherits, and who may."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.membership import EpochRecord, Loss, Position
from parallel3d.elastic.protocol import Seal
from parallel3d.elastic.succession import GuardianPlace, Roster, Witness, may_serve
from parallel3d.elastic.successor import ResumedProtocol
from parallel3d.errors import LaunchError
from parallel3d.topology.grid import Grid


def roster(guardian_hosts: str, coordinator: int = 0, hosts: str | None = None) -> Roster:
    """A guardian of one rank for each letter; `coordinator` is the number of the one that serves."""
    places = tuple(
        GuardianPlace(ranks=(rank,), host=host, address=(host, rank)) for rank, host in enumerate(guardian_hosts)
    )
    return Roster(coordinator=places[coordinator], guardians=places, hosts=tuple(sorted(set(hosts or guardian_hosts))))


def ranks_of(places: tuple[GuardianPlace, ...]) -> list[int]:
    return [rank for place in places for rank in place.ranks]


def test_the_first_guardian_of_each_host_inherits_beginning_with_the_next_host():
    assert ranks_of(roster("aabbcc").heirs) == [2, 4]
    assert ranks_of(roster("aabbcc", coordinator=2).heirs) == [4, 0]
    assert ranks_of(roster("abcabc", coordinator=2).heirs) == [0, 1]
    assert ranks_of(roster("abcd", hosts="acd").heirs) == [2, 3]  # a host whose workers are all lost has no say
    assert ranks_of(roster("aaaa").heirs) == []


def test_survivors_and_the_bereaved():
    assert ranks_of(roster("aabbcc", coordinator=2).survivors) == [0, 1, 4, 5]
    assert ranks_of(roster("aabbcc", coordinator=2).bereaved) == [3]


def test_a_roster_survives_the_wire():
    sent = roster("aabbc", coordinator=2)
    assert Roster.from_json(json.loads(json.dumps(sent.to_json()))) == sent


@pytest.mark.parametrize(
    ("reached", "hosts", "witness", "enough"),
    [
        ("bc", "abc", "never asked", True),
        ("c", "abc", "", False),  # a witness does not replace a host
        ("b", "ab", "", True),
        ("b", "ab", "held by the others", False),
        ("cd", "abcd", "", True),
        ("cd", "abcd", "there is none", False),
        ("bcd", "abcd", "never asked", True),
        ("bx", "abc", "", False),  # a host that is no member does not count
        ("", "ab", "", False),
    ],
)
def test_who_may_serve(reached, hosts, witness, enough):
    quorum = may_serve(set(reached), set(hosts), take_witness=lambda: witness)
    assert quorum.enough == enough and bool(quorum.reason) != enough
    assert f"reaches {len(set(reached) & set(hosts))} of {len(hosts)} hosts" in quorum.reason or enough


@given(hosts=st.sets(st.integers(0, 7), min_size=1), side=st.sets(st.integers(0, 7)), holder=st.booleans())
def test_two_sides_never_serve_both(hosts, side, holder):
    """One lock: whichever side holds the witness, the other can't."""
    here = may_serve(side, hosts, take_witness=lambda: "" if holder else "held")
    there = may_serve(hosts - side, hosts, take_witness=lambda: "held" if holder else "")
    assert not (here.enough and there.enough)
    assert here.enough or there.enough  # nor does a split alone stop a run that has a witness


def test_one_holds_the_witness(tmp_path):
    first, second, none = Witness(str(tmp_path / "w")), Witness(str(tmp_path / "w")), Witness(None)
    first.take_first()
    assert first.take() == "" and "is held by another side" in second.take()
    with pytest.raises(LaunchError, match="elastic.witness"):
        second.take_first()
    none.take_first()
    assert none.take() == "there is no witness (elastic.witness)"
    assert "can't be locked (No such file" in Witness(str(tmp_path / "no" / "w")).take()


def test_a_resumed_protocol_goes_on_behind_every_number_that_was_announced(elastic_settings):
    grid = Grid.straight(tp_size=1, pp_size=1, dp_size=4)
    committed = EpochRecord(
        epoch=5,
        grid=grid.without([1, 3])[0],
        previous=grid,
        members=(0, 2, 3),
        leavers=(3,),
        position=Position(iteration=9),
        hosts={rank: f"host {rank}" for rank in range(4)},
        last_told=8,
    )
    protocol = ResumedProtocol(elastic_settings(grid), committed, announced=7)
    assert protocol.live == {0, 2} and protocol.last_told == 8
    (seal,) = protocol.lose([Loss(rank=1, why="long ago")]) or protocol.begin("the coordinator is lost")
    assert seal == Seal(ranks=(0, 2), epoch=8, reason="the coordinator is lost")
    (again,) = protocol.lose([Loss(rank=0, why="killed")])
    assert again.epoch == 9 and again.ranks == (2,)
