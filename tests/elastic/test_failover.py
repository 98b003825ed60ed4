"""Who inherits, and who may."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.coordinator.failover_coordinator import ResumedProtocol
from parallel3d.elastic.coordinator.witness import OVER, Witness
from parallel3d.elastic.protocol.actions import AbortGeneration
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo, check_quorum
from parallel3d.elastic.protocol.membership import GenerationRecord, LogPosition, LostWorker
from parallel3d.errors import LaunchError
from parallel3d.parallel.grid import Grid


def failover_plan(guardian_hosts: str, coordinator: int = 0, hosts: str | None = None) -> FailoverPlan:
    """A guardian of one rank for each letter; `coordinator` is the number of the one that serves."""
    guardians = tuple(
        GuardianInfo(ranks=(rank,), host=host, address=(host, rank)) for rank, host in enumerate(guardian_hosts)
    )
    return FailoverPlan(
        coordinator=guardians[coordinator], guardians=guardians, hosts=tuple(sorted(set(hosts or guardian_hosts)))
    )


def ranks_of(guardians: tuple[GuardianInfo, ...]) -> list[int]:
    return [rank for guardian in guardians for rank in guardian.ranks]


def test_the_first_guardian_of_each_host_inherits_beginning_with_the_next_host():
    assert ranks_of(failover_plan("aabbcc").candidates) == [2, 4]
    assert ranks_of(failover_plan("aabbcc", coordinator=2).candidates) == [4, 0]
    assert ranks_of(failover_plan("abcabc", coordinator=2).candidates) == [0, 1]
    assert ranks_of(failover_plan("abcd", hosts="acd").candidates) == [
        2,
        3,
    ]  # a host whose workers are all lost has no say
    assert ranks_of(failover_plan("aaaa").candidates) == []


def test_surviving_and_same_host_guardians():
    assert ranks_of(failover_plan("aabbcc", coordinator=2).surviving_guardians) == [0, 1, 4, 5]
    assert ranks_of(failover_plan("aabbcc", coordinator=2).same_host_guardians) == [3]


def test_of_two_sides_with_guardians_of_the_same_hosts_one_reaches_each():
    """Guardians of one host may connect to different sides: it counts for that of its first one."""
    plan = failover_plan("aabbcc")
    assert plan.reached_hosts([(0,), (1,), (2,), (5,)]) == {"a", "b"}
    assert plan.reached_hosts([(3,), (4,)]) == {"c"}


def test_a_failover_plan_survives_the_wire():
    sent = failover_plan("aabbc", coordinator=2)
    assert FailoverPlan.from_json(json.loads(json.dumps(sent.to_json()))) == sent


@pytest.mark.parametrize(
    ("reached", "hosts", "witness", "has_quorum"),
    [
        ("bc", "abc", "never asked", True),
        ("c", "abc", "", False),  # a witness does not replace a host
        ("b", "ab", "", True),
        ("b", "ab", "held by the others", False),
        ("cd", "abcd", "", True),
        ("cd", "abcd", "there is none", False),
        ("bcd", "abcd", "never asked", True),
        ("bx", "abc", "", False),  # a host outside of the generation does not count
        ("", "ab", "", False),
    ],
)
def test_who_may_serve(reached, hosts, witness, has_quorum):
    quorum = check_quorum(set(reached), set(hosts), lock_witness=lambda: witness)
    assert quorum.has_quorum == has_quorum and bool(quorum.reason) != has_quorum
    assert f"reaches {len(set(reached) & set(hosts))} of {len(hosts)} hosts" in quorum.reason or has_quorum


@given(hosts=st.sets(st.integers(0, 7), min_size=1), side=st.sets(st.integers(0, 7)), holder=st.booleans())
def test_two_sides_never_serve_both(hosts, side, holder):
    """One lock: whichever side holds the witness, the other can't."""
    here = check_quorum(side, hosts, lock_witness=lambda: "" if holder else "held")
    there = check_quorum(hosts - side, hosts, lock_witness=lambda: "held" if holder else "")
    assert not (here.has_quorum and there.has_quorum)
    assert here.has_quorum or there.has_quorum  # nor does a split alone stop a run that has a witness


def test_one_holds_the_witness(tmp_path):
    first, second, none = Witness(str(tmp_path / "w")), Witness(str(tmp_path / "w")), Witness(None)
    first.lock_at_start()
    assert first.try_lock() == "" and "is held by another side" in second.try_lock()
    with pytest.raises(LaunchError, match="elastic.witness"):
        second.lock_at_start()
    none.lock_at_start()
    assert none.try_lock() == "no witness is configured (elastic.witness)"
    assert "can't be locked (No such file" in Witness(str(tmp_path / "no" / "w")).try_lock()


def test_a_side_that_has_been_passed_does_not_begin_again(tmp_path):
    """The other side went on alone, or to the end, and freed the lock as it ended."""
    path = str(tmp_path / "w")
    first, second = Witness(path), Witness(path)
    first.lock_at_start()
    first.mark(3)
    assert "is held by another side" in second.try_lock(3)
    del first
    assert second.try_lock(3) == "" and second.try_lock(2).endswith("and the run has gone on to generation 3 there")
    second.mark(OVER)
    third = Witness(path)
    third.mark(0)  # without the lock it writes nothing
    del second
    assert third.try_lock(3).endswith("and the run has ended there")
    third.lock_at_start()  # another run, or a restart
    assert third.try_lock(0) == ""


def test_a_witness_with_other_contents_is_new(tmp_path):
    (tmp_path / "w").write_text("words")
    assert Witness(str(tmp_path / "w")).try_lock(0) == ""


def test_a_resumed_protocol_goes_on_behind_every_number_that_was_announced(elastic_settings):
    grid = Grid.uniform(tp_size=1, pp_size=1, dp_size=4)
    committed = GenerationRecord(
        generation=5,
        grid=grid.without([1, 3])[0],
        previous=grid,
        members=(0, 2, 3),
        draining=(3,),
        position=LogPosition(iteration=9),
        hosts={rank: f"host {rank}" for rank in range(4)},
        last_reported_step=8,
    )
    protocol = ResumedProtocol(elastic_settings(grid), committed, newest_generation=7)
    assert protocol.live == {0, 2} and protocol.last_reported_step == 8
    (abort_generation,) = protocol.on_lost([LostWorker(rank=1, why="long ago")]) or protocol.begin(
        "the coordinator is lost"
    )
    assert abort_generation == AbortGeneration(ranks=(0, 2), generation=8, reason="the coordinator is lost")
    (again,) = protocol.on_lost([LostWorker(rank=0, why="killed")])
    assert again.generation == 9 and again.ranks == (2,)
