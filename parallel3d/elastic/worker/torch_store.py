"""A torch store over the control channel: process groups rendezvous without a TCPStore, and an abort ends the wait."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store

from parallel3d.elastic.gathered_values import without_padding
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.parallel.abort import AbortToken


class ControlStore(Store):
    """The store interface that ProcessGroupGloo and PrefixStore need; aborting `token` ends every wait.

    gloo gets its peers' addresses one by one, twice each, under keys that end in the peer's number. Given the group's
    `size`, the store gathers what all ranks have set under such keys with the first.
    """

    def __init__(self, control: ControlChannel, token: AbortToken, *, size: int = 0):
        super().__init__()
        self._control = control
        self._token = token
        self._size = size
        self._fetched: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self._control.set(key, without_padding(encoded, size=self._size) if self._base_of(key) else encoded)

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
        base, *others = {self._base_of(key) for key in missing} or {""}
        if base and not others:
            values = self._control.gather(base, self._size, self._token)
            self._fetched.update((f"{base}/{rank}", value) for rank, value in enumerate(values))
        elif missing:
            self._fetched.update(zip(missing, self._control.get_all(missing, self._token)))

    def _base_of(self, key: str) -> str:
        """What stands before the number in a key of one of the group's ranks; "" for any other key."""
        base, _, number = key.rpartition("/")
        return base if number.isdigit() and int(number) < self._size else ""
