"""A torch store over the control channel: process groups rendezvous without a TCPStore, and an abort ends the wait."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store

from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.parallel.abort import AbortToken


class ControlStore(Store):
    """The store interface that ProcessGroupGloo and PrefixStore need; aborting `token` ends every wait.

    gloo gets its peers' addresses one by one, twice each, under keys that end in the peer's number. Given `num_ranks`,
    the store fetches all of them with the first: one exchange in place of 2 x `num_ranks`.
    """

    def __init__(self, control: ControlChannel, token: AbortToken, *, num_ranks: int = 0):
        super().__init__()
        self._control = control
        self._token = token
        self._num_ranks = num_ranks
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
        if missing:
            wanted = self._sibling_keys(missing[0]) if len(missing) == 1 else missing
            self._fetched.update(zip(wanted, self._control.get_all(wanted, self._token)))

    def _sibling_keys(self, key: str) -> list[str]:
        """Returns the keys of all ranks of the group, given the key of one of them."""
        base, _, number = key.rpartition("/")
        if number.isdigit() and int(number) < self._num_ranks:
            return [f"{base}/{rank}" for rank in range(self._num_ranks)]
        return [key]
