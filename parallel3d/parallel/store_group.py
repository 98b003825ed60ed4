"""The base of groups over a torch process group that is built directly from a store, without a process-wide registry.

A new membership generation is therefore a new set of objects and nothing else. Building and destroying a process group
may block for long, so both happen on background threads.
"""

from __future__ import annotations

from abc import abstractmethod
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.background import build_in_background, release_in_background
from parallel3d.parallel.group import Group


class StoreGroup(Group):
    """A group of ranks in several processes. `store` must be fresh for this name, which contains the generation."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        store: dist.Store,
        token: AbortToken,
        timeout_s: float,
    ):
        super().__init__(name=name, rank=rank, ranks=ranks)
        self.token = token
        self.timeout_s = timeout_s

        def build() -> Any:
            self._enter_thread()
            return self._build(dist.PrefixStore(name, store), timedelta(seconds=timeout_s))

        self._pg: Any = build_in_background(build, name, token, timeout_s)
        token.on_abort(self._on_abort)

    @abstractmethod
    def _build(self, store: dist.Store, timeout: timedelta) -> Any:
        """Connects with the peers; returns the process group. Runs on a background thread."""

    @abstractmethod
    def _on_abort(self) -> None:
        """Runs when the token is aborted, on the aborting thread."""

    def _enter_thread(self) -> None:
        """Runs first on each background thread of the group, for libraries with settings per thread."""

    def close(self) -> None:
        self.token.remove_callback(self._on_abort)
        only = [self._pg]
        self._pg = None
        release_in_background(only, f"close-{self.name}", self._enter_thread)


def max_options() -> Any:
    """Options of an all-reduce that takes the maximum."""
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options
