"""What a group's ranks have set, for each of them: whole but for the tables, and small."""

from __future__ import annotations

import random
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.gathered_values import WORD_BYTES, decode_values, encode_values, without_padding


@given(heads=st.lists(st.binary(max_size=20), min_size=1, max_size=6), tables=st.data(), are_equal=st.booleans())
def test_values_come_back_whether_their_tables_are_equal_or_not(heads, tables, are_equal):
    table = st.binary(min_size=WORD_BYTES * len(heads), max_size=WORD_BYTES * len(heads))
    first = tables.draw(table)
    values = [head + (first if are_equal else tables.draw(table)) for head in heads]
    assert decode_values(encode_values(values)) == values


@given(values=st.lists(st.binary(max_size=60), max_size=4))
def test_any_values_come_back(values):
    assert decode_values(encode_values(values)) == values


def test_tables_that_are_all_the_same_are_sent_once():
    tables = [random.Random(1).randbytes(WORD_BYTES * 100)] * 100
    assert len(encode_values(tables)) < 2 * len(tables[0])


class SharedStore(dist.Store):
    """A store of ranks that are threads."""

    def __init__(self, values: dict[str, bytes], came: threading.Condition):
        super().__init__()
        self.values, self._came = values, came

    def set(self, key: str, value: str | bytes) -> None:
        with self._came:
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._came.notify_all()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._came:
            assert self._came.wait_for(lambda: all(key in self.values for key in keys), 300)


@pytest.mark.parametrize("hostname, num_address_bytes", [("127.0.0.1", 16), ("::1", 28)])
def test_what_gloo_sets_is_known_and_nothing_but_addresses_stays(hostname: str, num_address_bytes: int):
    """Fails where a new version of torch sets values of another form: then answers are four times as long."""
    values: dict[str, bytes] = {}
    came, groups = threading.Condition(), []

    def build(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
        options._timeout = timedelta(seconds=20)
        groups.append(dist.ProcessGroupGloo(SharedStore(values, came), rank, 3, options))

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(groups) == 3 and len(values) == 3
    for value in values.values():
        storage_start = len(value) - 3 * WORD_BYTES - 8 - 128
        padding = slice(storage_start + num_address_bytes, storage_start + 128)
        dirty = value[: padding.start] + b"stack" * 20 + value[padding.start + 100 :]
        clean = value[: padding.start] + bytes(128 - num_address_bytes) + value[padding.stop :]
        assert without_padding(value, size=3) == without_padding(dirty, size=3) == clean


@given(value=st.binary(max_size=200), size=st.integers(0, 20))
def test_other_values_stay_as_they_are(value: bytes, size: int):
    assert without_padding(value, size=size) == value
