"""A torch store over the control channel: process groups meet without a TCPStore, and stop meeting when aborted."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store

from parallel3d.comm.abort import AbortToken
from parallel3d.elastic.control import Control


class ControlStore(Store):
    """What ProcessGroupGloo and PrefixStore ask of a store; every wait ends with `token`."""

    def __init__(self, control: Control, token: AbortToken):
        super().__init__()
        self._control = control
        self._token = token

    def set(self, key: str, value: str | bytes) -> None:
        self._control.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._control.get(key, self._token)

    def check(self, keys: list[str]) -> bool:
        return self._control.check(list(keys), self._token)

    def add(self, key: str, amount: int) -> int:
        return self._control.add(key, amount, self._token)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all `keys` are set. The token bounds the wait; `timeout` is for stores that have none."""
        for key in keys:
            self._control.get(key, self._token)
