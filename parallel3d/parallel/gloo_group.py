"""A group over gloo, built directly from a store: no process-wide registry, so that a new membership generation is a
new set of objects and nothing else.

A wait sleeps until gloo's future calls back or the abort token does. What gloo's thread calls is one function in C,
`SimpleQueue.put`: Python code there would still hold Python's lock when the rank's own thread wakes. gloo has no abort
of its own: `abandon` lets a receive that nobody will answer time out after 1 ms, upon which gloo fails every pair of
the group and closes its sockets, here and, by the closed sockets, at the peers. That takes some 10 ms a peer, and
nobody waits for it: while something is under way (`is_busy`) its tensors may still be written, so that whoever owns
them goes on with others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.errors import GenerationEnded
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.background import ABORT_GRACE_S, build_in_background, release_in_background
from parallel3d.parallel.group import Group, Work

_UNUSED_TAG = 0x7FFF


class GlooGroup(Group):
    """Ranks of several processes over TCP. `store` must be fresh for this name (generations are part of the name).

    `address` is this host's as the other ranks reach it: gloo's own guess, the host's name, is often a loopback one.
    """

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
        self.token = token
        self.timeout_s = timeout_s
        self._running: set[_GlooWork] = set()
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        self._pg: Any = build_in_background(
            lambda: gloo(dist.PrefixStore(name, store), rank, len(ranks), options), name, token, timeout_s
        )
        token.on_abort(self._wake_all)

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._track(self._pg.allreduce([tensor]))

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        """gloo has no reduce-scatter: torch's own is an all-reduce of a copy, this one an all-reduce in place."""

        def take_own_part() -> None:
            output.copy_(tensor.view(-1)[self.rank * output.numel() :][: output.numel()].view_as(output))

        return self._track(self._pg.allreduce([tensor]), then=take_own_part)

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._track(self._pg._allgather_base(output, tensor))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._track(self._pg.allreduce([tensor], options)).wait()  # bounded: by token and timeout
        return tensor

    def abort(self) -> None:
        threading.Thread(target=_fail_all_pairs, args=(self._pg,), daemon=True, name=f"abandon-{self.name}").start()

    @property
    def is_busy(self) -> bool:
        self._running = {work for work in self._running if not work.has_ended}
        return bool(self._running)

    def close(self) -> None:
        """gloo takes some 10 ms a peer to close, and as long as its timeout where a collective hangs: another thread
        waits for it."""
        self.token.remove_callback(self._wake_all)
        only = [self._pg]
        self._pg = None
        release_in_background(only, f"close-{self.name}")

    def _track(self, work: dist.Work, *, then: Callable[[], None] | None = None) -> Work:
        tracked = _GlooWork(work, self, then or _nothing)
        self._running.add(tracked)
        return tracked

    def _wake_all(self) -> None:
        for work in list(self._running):
            work.wake()


class _GlooWork:
    """gloo keeps the tensors alive until it is done with them; `then` runs once it is waited for."""

    def __init__(self, work: dist.Work, group: GlooGroup, then: Callable[[], None]):
        self._work = work
        self._group = group
        self._then = then
        self._wakes: SimpleQueue[object] = SimpleQueue()

    @property
    def has_ended(self) -> bool:
        """Well or badly: gloo touches the tensors no more."""
        return self._work.is_completed()

    def wake(self) -> None:
        self._wakes.put(None)

    def wait(self) -> None:
        group = self._group
        group.token.check()
        if not self.has_ended:
            self._sleep()
            group.token.check()
        try:
            self._work.wait()  # bounded: it has finished, well or badly
        except RuntimeError as error:
            reason = f"group {group.name}: {str(error).splitlines()[0]}"
        else:
            group._running.discard(self)
            self._then()
            self._then = _nothing
            return
        group.token.sleep(ABORT_GRACE_S)
        raise GenerationEnded(reason)

    def _sleep(self) -> None:
        """Until gloo has finished or the token is aborted."""
        group = self._group
        self._work.get_future().add_done_callback(self._wakes.put)
        with group.token.waiting(group.name, group.ranks):
            try:
                self._wakes.get(timeout=group.timeout_s)
            except Empty:
                raise GenerationEnded(f"group {group.name}: no answer from a peer in {group.timeout_s:.0f} s") from None


def _nothing() -> None:
    return None


def _fail_all_pairs(pg: Any) -> None:
    with contextlib.suppress(RuntimeError):
        pg.recv_anysource([torch.zeros(1)], _UNUSED_TAG).wait(timedelta(milliseconds=1))
