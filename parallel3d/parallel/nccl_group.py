"""A group over NCCL, built directly from a store, as the one over gloo is: for ranks that have a GPU each.

A collective is work for the device: `wait` orders it before what the device is given next, and the host goes on. So a
lost peer shows only where the host reads a result, as a device that never gets there. Therefore the end of a generation
aborts the communicator: its kernels return, the host reads whatever there is, and finds the token aborted.

Written, not run: there was no machine with several GPUs at hand.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.background import build_in_background, release_in_background
from parallel3d.parallel.group import Group, Work

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""To be set before the first group is built: torch then leaves it to us what a lost peer means. By default it ends the
whole process."""


class NcclGroup(Group):
    """`device` is this rank's own. `store` must be fresh for this name (generations are part of the name)."""

    waits_for_data = False

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        store: dist.Store,
        token: AbortToken,
        timeout_s: float,
        device: torch.device,
    ):
        super().__init__(name=name, rank=rank, ranks=ranks)
        self.token = token
        self._ended = threading.Event()
        self._is_ending = False
        self._lock = threading.Lock()

        def build() -> Any:
            torch.cuda.set_device(device)  # of this thread
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=timeout_s)
            pg = nccl(dist.PrefixStore(name, store), rank, len(ranks), options)
            pg.eager_connect_single_device(device)
            return pg

        self._pg: Any = build_in_background(build, name, token, timeout_s)
        token.on_abort(self.abort)

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._begin(lambda pg: pg.allreduce([tensor]))

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._begin(lambda pg: pg._reduce_scatter_base(output, tensor.view(-1)))

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._begin(lambda pg: pg._allgather_base(output, tensor))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._begin(lambda pg: pg.allreduce([tensor], options)).wait()  # bounded: orders the device's work alone
        return tensor

    def abort(self) -> None:
        """Aborts the communicator, once, on a thread of its own: that takes as long as the kernels take to notice."""
        with self._lock:
            is_first, self._is_ending = not self._is_ending, True
        if is_first:
            threading.Thread(target=self._abort, args=(self._pg,), daemon=True, name=f"abandon-{self.name}").start()

    @property
    def is_busy(self) -> bool:
        return self._is_ending and not self._ended.is_set()

    def close(self) -> None:
        self.token.remove_callback(self.abort)
        only = [self._pg]
        self._pg = None
        release_in_background(only, f"close-{self.name}")

    def _begin(self, post: Any) -> Work:
        self.token.check()
        return _NcclWork(post(self._pg), self.token)

    def _abort(self, pg: Any) -> None:
        try:
            if pg is not None:
                pg.abort()
        finally:
            self._ended.set()


class _NcclWork:
    def __init__(self, work: dist.Work, token: AbortToken):
        self._work = work
        self._token = token

    def wait(self) -> None:
        self._token.check()
        self._work.wait()  # bounded: orders the device's work alone
