"""The store's answers to many workers that all need to know about all: what building groups costs the coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from parallel3d.elastic.coordinator.kv_store import KeyValueStore
from parallel3d.elastic.gathered_values import decode_values
from parallel3d.errors import ProtocolError


class Asked:
    """A store, and what it has answered: (ranks, header, payload)."""

    def __init__(self):
        self.answers: list[tuple[list[int], dict[str, Any], bytes]] = []
        self.store = KeyValueStore({}, self._take)

    def say(self, rank: int, header: dict[str, Any], payload: bytes = b"") -> None:
        worker: Any = SimpleNamespace(rank=rank)
        self.store.handle(worker, header, payload)

    def gather(self, rank: int, *, size: int = 3) -> None:
        self.say(rank, {"op": "gather", "key": "generation1/dp/0", "size": size})

    def set(self, rank: int) -> None:
        self.say(rank, {"op": "set", "key": f"generation1/dp/0/{rank}"}, b"address of %d" % rank + bytes(range(24)))

    def compare(self, rank: int, states: dict[int, str], *, size: int = 3, key: str = "generation1/groups") -> None:
        header = {"op": "compare", "key": key, "size": size}
        self.say(rank, {**header, "numbers": list(states), "states": list(states.values())})

    def _take(self, connections, header, payload):
        self.answers.append(([each.rank for each in connections], header, payload))


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.mark.parametrize(
    "steps, answered",
    [
        ("sss ggg", [[0], [1], [2]]),
        ("ggg sss", [[0, 1, 2]]),
        ("sg sg sg", [[0, 1], [2]]),
        ("gs gs gs", [[0, 1, 2]]),
        ("ssg sgg", [[0], [1], [2]]),
    ],
)
def test_the_ranks_of_a_group_get_the_values_of_all_in_one_answer_where_they_wait(asked: Asked, steps, answered):
    ranks = {"s": iter((2, 0, 1)), "g": iter((0, 1, 2))}
    do = {"s": asked.set, "g": asked.gather}
    for step in steps.replace(" ", ""):
        assert not asked.answers or next(ranks["s"], None) is None, "not before the last one has set its value"
        do[step](next(ranks[step]))
    assert [ranks for ranks, _, _ in asked.answers] == answered
    for _, header, payload in asked.answers:
        assert header == {"op": "response", "id": "generation1/dp/0"}
        assert decode_values(payload) == [b"address of %d" % rank + bytes(range(24)) for rank in range(3)]


def test_a_gather_that_does_not_fit_the_others_is_refused(asked: Asked):
    asked.gather(0)
    with pytest.raises(ProtocolError, match="a gather of 2 values at generation1/dp/0, which has 3"):
        asked.gather(1, size=2)


def test_all_that_compare_get_one_answer_once_all_have_spoken(asked: Asked):
    asked.compare(0, {0: "a", 1: "b", 9: "c"})
    asked.compare(2, {0: "a", 1: "x", 9: "c"})
    assert not asked.answers
    asked.compare(1, {9: ""})
    ((ranks, header, payload),) = asked.answers
    assert ranks == [0, 2, 1] and header == {"op": "response", "id": "generation1/groups"}
    assert int.from_bytes(payload, "little") == 1 << 1 | 1 << 9


def test_where_nobody_differs_the_answer_is_empty(asked: Asked):
    for rank in range(3):
        asked.compare(rank, {5: "same", 6 + rank: "alone"})
    assert [payload for _, _, payload in asked.answers] == [b""]


def test_one_that_repeats_itself_counts_once(asked: Asked):
    for _ in range(5):
        asked.compare(0, {0: "a"}, size=2)
    assert not asked.answers, "the other one has not come"
    asked.compare(1, {0: "a"}, size=2)
    assert [ranks for ranks, _, _ in asked.answers] == [[0, 1]]


def test_a_comparison_that_has_been_answered_is_forgotten(asked: Asked):
    for rank in range(2):
        asked.compare(rank, {0: str(rank)}, size=2)
    asked.compare(0, {0: "a"}, size=2)
    assert len(asked.answers) == 1
    asked.compare(1, {0: "a"}, size=2)
    assert [payload for _, _, payload in asked.answers] == [b"\1", b""]


def test_a_comparison_that_a_member_never_joins_goes_with_its_generation(asked: Asked):
    asked.compare(0, {0: "a"}, size=2)
    asked.compare(0, {0: "a"}, size=2, key="generation2/groups")
    asked.store.drop_generations_before(2)
    for key in ("generation1/groups", "generation2/groups"):
        asked.compare(1, {0: "b"}, size=2, key=key)
    assert [header["id"] for _, header, _ in asked.answers] == ["generation2/groups"]


@pytest.mark.parametrize("header", [{"size": 3, "states": ["a"]}, {"size": 2, "states": []}])
def test_a_comparison_that_does_not_fit_the_others_is_refused(asked: Asked, header: dict[str, Any]):
    asked.compare(0, {0: "a"}, size=2)
    with pytest.raises(ProtocolError, match="compared by"):
        asked.say(1, {"op": "compare", "key": "generation1/groups", "numbers": [0], **header})


def test_a_gathering_goes_with_its_generation(asked: Asked):
    for rank in range(3):
        asked.set(rank)
    asked.gather(0)
    asked.store.drop_generations_before(2)
    asked.gather(1)
    assert len(asked.answers) == 1


class CountedList(list):
    """Counts how often its items are read."""

    num_reads = 0

    def __getitem__(self, index):
        self.num_reads += 1
        return super().__getitem__(index)


def test_a_request_looks_at_each_key_about_once_in_whatever_order_they_are_set():
    sent: list[bytes] = []
    store = KeyValueStore({}, lambda connection, header, payload: sent.append(payload))
    worker: Any = object()
    keys = CountedList(f"generation1/{number}" for number in range(100))
    store.handle(worker, {"op": "get_all", "id": 1, "keys": keys}, b"")
    for number, key in enumerate(list(keys)):
        assert not sent
        store.handle(worker, {"op": "set", "key": key}, bytes([number]))
    assert sent == [bytes(range(100))]
    assert keys.num_reads <= 4 * len(keys)


def test_what_a_generation_has_set_or_waits_for_goes_with_it():
    sent: list[dict[str, Any]] = []
    store = KeyValueStore({"first": b"1"}, lambda connection, header, payload: sent.append(header))
    worker: Any = object()
    for key in ("run", "generation1/a", "generation2/a"):
        store.handle(worker, {"op": "set", "key": key}, b"")
    for number, key in enumerate(("generation1/b", "generation2/b", "later")):
        store.handle(worker, {"op": "get", "key": key, "id": number}, b"")
    store.drop_generations_before(2)
    for key in ("generation1/b", "generation2/b", "later"):
        store.handle(worker, {"op": "set", "key": key}, b"")
    assert [header["id"] for header in sent] == [1, 2]
    for number, key in enumerate(("first", "run", "generation1/a", "generation2/a"), start=3):
        store.handle(worker, {"op": "check", "keys": [key], "id": number}, b"")
    assert [header["found"] for header in sent[2:]] == [True, True, False, True]
