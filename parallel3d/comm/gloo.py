"""A group over gloo, built directly from a store: no process-wide registry, so that a new membership epoch is a new set
of objects and nothing else.

Waits poll: gloo's collectives keep running after a timed-out `wait`, so each wait looks at the abort token every
POLL_S. A connection error means that a peer is gone; who it was is known to the coordinator a moment later, so the
wait lingers for the token's better reason before it raises its own.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.abort import POLL_S, AbortToken
from parallel3d.comm.group import Group, Work
from parallel3d.errors import EpochEnded

_POLL = timedelta(seconds=POLL_S)
_LINGER_S = 5.0


class GlooGroup(Group):
    """Ranks of several processes over TCP. `store` must be fresh for this name (epochs are part of the name).

    `address` is this host's as the other ranks reach it: gloo's own guess, the host's name, is often a loopback one."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        store: dist.Store,
        token: AbortToken,
        timeout_s: float,
        address: str = "127.0.0.1",
    ):
        super().__init__(name=name, rank=rank, ranks=ranks)
        self._token = token
        self._timeout_s = timeout_s
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        self._pg = gloo(dist.PrefixStore(name, store), rank, len(ranks), options)

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._wrap(self._pg.allreduce([tensor]), (tensor,))

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._wrap(self._pg._reduce_scatter_base(output, tensor), (output, tensor))

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._wrap(self._pg._allgather_base(output, tensor), (output, tensor))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wrap(self._pg.allreduce([tensor], options), (tensor,)).wait()  # bounded: polls the token
        return tensor

    def close(self) -> None:
        del self._pg

    def _wrap(self, work: dist.Work, tensors: tuple[Tensor, ...]) -> Work:
        return _GlooWork(work, tensors, self.name, self._token, self._timeout_s)


@dataclass
class _GlooWork:
    """Keeps the tensors alive until gloo is done with them."""

    work: dist.Work
    tensors: tuple[Tensor, ...]
    group: str
    token: AbortToken
    timeout_s: float

    def wait(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                self.work.wait(_POLL)
                return
            except RuntimeError as error:
                self.token.check()
                if self.work.is_completed():
                    self._finish(error)
                    return
                if time.monotonic() > deadline:
                    raise EpochEnded(f"group {self.group}: no answer from a peer in {self.timeout_s:.0f} s") from None

    def _finish(self, error: RuntimeError) -> None:
        """The work ended between the poll and the check, well or badly: wait once more to learn which."""
        with contextlib.suppress(RuntimeError):
            self.work.wait(_POLL)
            return
        self.token.sleep(_LINGER_S)
        raise EpochEnded(f"group {self.group}: {str(error).splitlines()[0]}")
