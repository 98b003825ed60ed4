"""A change of membership waits for answers only so long, then evicts those that keep the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from parallel3d.elastic.coordinator.change_deadline import ChangeDeadline
from parallel3d.elastic.hang_report import STATUS_TIMEOUT_S

CHANGE_S = 100.0
LATE_S = CHANGE_S + 1
WHY = f"no answer to the change to generation 2 within {CHANGE_S:g} s"


class World:
    """Four workers; `asked` and `killed` are what the deadline has done."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.killed: dict[int, str] = {}
        server: Any = SimpleNamespace(send_to_workers=lambda ranks, header: self.asked.append(sorted(ranks)))
        fences: Any = SimpleNamespace(kill=self.killed.update)
        self.deadline = ChangeDeadline(server, fences, change_s=CHANGE_S)

    def check(self, now_s: float, *unanswered: int, awaited: object = (2, False, False)) -> None:
        protocol: Any = SimpleNamespace(
            awaited=awaited, pending=2, unanswered=frozenset(unanswered), live=frozenset(range(4))
        )
        self.deadline.check(protocol, now_s)

    def answer(self, rank: int, *peers: int) -> None:
        """Answers that a worker waits for its peers; without any, that it does not wait."""
        status = {"doing": "move", "for_s": 90.0, "is_waiting": bool(peers), "what": "", "peers": list(peers)}
        self.deadline.add_status(rank, status)


@pytest.fixture
def world() -> World:
    return World()


def test_each_wait_of_a_change_has_its_own_deadline(world: World):
    waits = [(1, False, True), (2, False, True), (2, True, True), (2, False, False), None]
    for number, awaited in enumerate(waits):
        world.check(number * LATE_S, 3, awaited=awaited)
        world.check(number * LATE_S + 0.9 * CHANGE_S, 3, awaited=awaited)
    world.check(99 * LATE_S, awaited=None)
    assert not world.asked


def test_the_one_for_whom_the_others_wait_is_evicted(world: World):
    world.check(0.0, 0, 1, 2, 3)
    world.check(LATE_S, 0, 1, 2)
    assert world.asked == [[0, 1, 2, 3]] and not world.killed
    for rank, *peers in ([0, 1], [1, 2], [2], [3]):
        world.answer(rank, *peers)
    world.check(LATE_S, 0, 1, 2)
    assert world.killed == {2: WHY}
    world.check(LATE_S + 0.9 * CHANGE_S, 0, 1, 2)
    assert len(world.asked) == 1  # its guardian has as long to kill it


def test_one_that_does_not_say_what_it_does_is_evicted(world: World):
    world.check(0.0, 0, 1)
    world.check(LATE_S, 0, 1)
    world.answer(0, 1)
    world.check(LATE_S + 0.9 * STATUS_TIMEOUT_S, 0, 1)
    assert not world.killed
    world.check(LATE_S + STATUS_TIMEOUT_S, 0, 1)
    assert world.killed == {1: WHY}


@pytest.mark.parametrize("others", [[(2, 0), (0, 1), (1, 0)], [(2, 3), (0, 3), (1, 3)]], ids=["cycle", "done"])
def test_without_an_end_of_the_chain_among_them_more_are_evicted(world: World, others: list[tuple[int, int]]):
    """Two wait for each other; or all wait for one that has answered."""
    world.check(0.0, 0, 1, 2)
    world.check(LATE_S, 0, 1, 2)
    for rank, peer in others:
        world.answer(rank, peer)
    world.answer(3)
    world.check(LATE_S, 0, 1, 2)
    assert world.killed.keys() == ({0, 1} if others[0] == (2, 0) else {0, 1, 2})


def test_an_answer_in_the_meantime_ends_the_inquiry(world: World):
    world.check(0.0, 1)
    world.check(LATE_S, 1)
    world.check(LATE_S + STATUS_TIMEOUT_S, awaited=None)
    world.check(9 * LATE_S, awaited=None)
    assert not world.killed
