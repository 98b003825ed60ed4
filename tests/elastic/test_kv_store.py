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
