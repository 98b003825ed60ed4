"""A torch store over the control channel: process groups rendezvous without a TCPStore, and an abort ends the wait."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store

from parallel3d.elastic.coordinator.kv_store import WORD_BYTES
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.parallel.abort import AbortToken


class ControlStore(Store):
    """The store interface that ProcessGroupGloo and PrefixStore need; aborting `token` ends every wait.

    gloo gets its peers' addresses one by one, twice each, under keys that end in the peer's number. A value is the
    peer's address and a table of 8 bytes for each rank, of which gloo reads this rank's. Given the group's `size` and
    this rank's `number` in it, the store fetches the addresses of all with the first, each with that one word.
    """

    def __init__(self, control: ControlChannel, token: AbortToken, *, size: int = 0, number: int = 0):
        super().__init__()
        self._control = control
        self._token = token
        self._size = size
        self._number = number
        self._fetched: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._control.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        if key not in self._fetched:
            return self._control.get(key, self._token)
        return self._fetched[key]

    def check(self, keys: list[str]) -> bool:
        return self._control.check(list(keys), self._token)

    def add(self, key: str, amount: int) -> int:
        return self._control.add(key, amount, self._token)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all `keys` are set. The token bounds the wait; `timeout` is for stores that have none."""
        missing = [key for key in keys if key not in self._fetched]
        siblings = self._sibling_keys(missing[0]) if len(missing) == 1 else []
        if siblings:
            values = self._control.get_all(siblings, self._token, column=[self._size, self._number])
            self._fetched.update(zip(siblings, map(self._with_table, values)))
        elif missing:
            self._fetched.update(zip(missing, self._control.get_all(missing, self._token)))

    def _with_table(self, value: bytes) -> bytes:
        """The peer's value with a table in which only this rank's word is right."""
        before, after = self._number * WORD_BYTES, (self._size - 1 - self._number) * WORD_BYTES
        return value[:-WORD_BYTES] + bytes(before) + value[-WORD_BYTES:] + bytes(after)

    def _sibling_keys(self, key: str) -> list[str]:
        """Returns the keys of all ranks of the group, given the key of one of them; [] for any other key."""
        base, _, number = key.rpartition("/")
        if number.isdigit() and int(number) < self._size:
            return [f"{base}/{rank}" for rank in range(self._size)]
        return []
