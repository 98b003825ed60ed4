"""The store's answers with one column of tables: what building a large group costs the coordinator."""

from __future__ import annotations

from typing import Any

import pytest

from parallel3d.elastic.coordinator.kv_store import KeyValueStore, cut_column

TABLE = b"".join(number.to_bytes(8, "little") for number in (50, 51, 52))


def test_an_answer_has_what_stands_before_the_table_and_one_word():
    sent: list[tuple[dict[str, Any], bytes]] = []
    store = KeyValueStore(
        {"g/0": b"address 0" + TABLE}, lambda connection, header, payload: sent.append((header, payload))
    )
    worker: Any = object()
    store.handle(worker, {"op": "get_all", "id": 1, "keys": ["g/0", "g/1"], "column": [3, 2]}, b"")
    assert not sent  # until the last key is set
    store.handle(worker, {"op": "set", "key": "g/1"}, b"longer address 1" + TABLE)
    ((header, payload),) = sent
    assert header == {"op": "response", "id": 1, "sizes": [17, 24]}
    assert payload == b"address 0" + TABLE[16:] + b"longer address 1" + TABLE[16:]


@pytest.mark.parametrize("column", [[4, 1], [2**62, 2**62], [0, 3]])
def test_a_value_without_such_a_table_is_cut_without_an_error(column: list[int]):
    assert len(cut_column(TABLE, column)) <= len(TABLE)


def test_without_a_column_values_are_whole():
    assert cut_column(TABLE, None) == TABLE


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
    store.handle(worker, {"op": "get_all", "id": 1, "keys": keys, "column": None}, b"")
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
