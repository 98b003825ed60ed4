"""A group over gloo.

A wait sleeps until gloo's future or the abort token calls back. What gloo's thread calls is one function in C,
`SimpleQueue.put`: Python code there would still hold Python's lock when the rank's main thread wakes. gloo has no abort
of its own: `abort` lets a receive without a sender time out after 1 ms, upon which gloo fails every pair of the group
and closes its sockets, here and, through the closed sockets, at the peers. That takes some 10 ms per peer, in the
background: while something is under way (`is_busy`), its tensors may still be written, so their owner must not reuse
them.
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
from parallel3d.parallel.abort import ABORT_GRACE_S, AbortToken
from parallel3d.parallel.group import Work
from parallel3d.parallel.store_group import StoreGroup, max_options

_UNUSED_TAG = 0x7FFF


class GlooGroup(StoreGroup):
    """Ranks of several processes over TCP.

    `address` is this host's as the other ranks reach it: gloo's default, the host's name, is often a loopback address.
    Destroying gloo's group takes some 10 ms per peer, and as long as its timeout if a collective hangs.
    """

    def __init__(self, *, address: str = "127.0.0.1", **settings: Any):
        self._address = address
        self._running: set[_GlooWork] = set()
        self._num_posted = self._num_finished = 0
        self._is_broken = False
        self._renewing = threading.Lock()
        super().__init__(**settings)
        self._built_as = self.name

    def _build(self, store: dist.Store, timeout: timedelta) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._address)]
        options._timeout = timeout
        return gloo(store, self.rank, self.size, options)

    def _on_abort(self) -> None:
        for work in list(self._running):
            work.wake()

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._track(self._pg.allreduce([tensor]))

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        """gloo has no reduce-scatter, and torch emulates it by an all-reduce. This one moves half of those bytes: each
        rank gets the others' versions of its part, and adds them up in rank order."""
        versions = torch.empty_like(tensor).view(self.size, -1)

        def add_up() -> None:
            total = output.view(-1)
            total.copy_(versions[0])
            for version in versions[1:]:
                total += version

        return self._track(self._pg.alltoall_base(versions.view(-1), tensor.view(-1), [], []), then=add_up)

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._track(self._pg._allgather_base(output, tensor))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        self._track(self._pg.allreduce([tensor], max_options())).wait()  # bounded: by token and timeout
        return tensor

    @property
    def state(self) -> str:
        # Between two collectives gloo's connections are idle. So they are when all members have left their generation
        # and finished every collective that any of them had posted. After an abort, a failure or an unfinished
        # collective no rank knows what is still on its way.
        if self._pg is None or self._is_broken or self._num_posted != self._num_finished:
            return ""
        return f"{self._built_as}: {self._num_finished} collectives"

    def renew(self, name: str, token: AbortToken) -> None:
        with self._renewing:  # an attempt that is over can't come after the next one
            token.check()
            self.token.remove_callback(self._on_abort)
            self.name, self.token = name, token
        token.on_abort(self._on_abort)

    def abort(self) -> None:
        """Fails what is under way, here and at the peers. A group that is between two collectives stays whole."""
        if self.state:
            return
        self._is_broken = True
        threading.Thread(target=_fail_all_pairs, args=(self._pg,), daemon=True, name=f"abort-{self.name}").start()

    @property
    def is_busy(self) -> bool:
        self._running = {work for work in self._running if not work.has_ended}
        return bool(self._running)

    def on_finished(self, work: _GlooWork) -> None:
        """Counts a work that has succeeded, once."""
        if work.is_new:
            work.is_new = False
            self._num_finished += 1
            self._running.discard(work)

    def _track(self, work: dist.Work, *, then: Callable[[], None] | None = None) -> Work:
        self._num_posted += 1
        tracked = _GlooWork(work, self, then or _nothing)
        self._running.add(tracked)
        return tracked


class _GlooWork:
    """A collective of gloo, which keeps its tensors alive; `then` runs in the first `wait`."""

    def __init__(self, work: dist.Work, group: GlooGroup, then: Callable[[], None]):
        self._work = work
        self._group = group
        self._then = then
        self.is_new = True
        """Until a wait for it has succeeded."""
        self._wakes: SimpleQueue[object] = SimpleQueue()

    @property
    def has_ended(self) -> bool:
        """True once gloo no longer touches the tensors, whether it succeeded or failed."""
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
            self._work.wait()  # bounded: it has ended
        except RuntimeError as error:
            reason = f"group {group.name}: {str(error).splitlines()[0]}"
        else:
            group.on_finished(self)
            self._then()
            self._then = _nothing
            return
        group.token.sleep(ABORT_GRACE_S)
        raise GenerationEnded(reason)

    def _sleep(self) -> None:
        """Sleeps until gloo has ended or the token is aborted."""
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
