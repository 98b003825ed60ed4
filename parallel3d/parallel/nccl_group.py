"""A group over NCCL, for ranks that have a GPU each.

A collective is work for the device: `wait` orders it before the device's later work, and the host goes on. So a lost
peer only shows where the host reads a result: the device never gets there. Therefore the end of a generation aborts the
communicator: its kernels return, the host reads whatever there is, and finds the token aborted.

Not run yet: no machine with several GPUs was available.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.accelerator import use_device
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.group import Work
from parallel3d.parallel.store_group import StoreGroup, max_options

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
}
"""To be set before the first group is built. torch then leaves lost peers to us, where by default it ends the process,
and the abort of a communicator that is still connecting returns, where by default the thread would hang in NCCL."""


class NcclGroup(StoreGroup):
    """Ranks with a GPU each; `device` is this rank's own."""

    waits_for_data = False

    def __init__(self, *, device: torch.device, **settings: Any):
        self._device = device
        self._ended = threading.Event()
        self._is_ending = False
        self._lock = threading.Lock()
        super().__init__(**settings)

    def _build(self, store: dist.Store, timeout: timedelta) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        pg = nccl(store, self.rank, self.size, options)
        pg.eager_connect_single_device(self._device)
        return pg

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._begin(lambda pg: pg.allreduce([tensor]))

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._begin(lambda pg: pg._reduce_scatter_base(output, tensor.view(-1)))

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        return self._begin(lambda pg: pg._allgather_base(output, tensor))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        self._begin(lambda pg: pg.allreduce([tensor], max_options())).wait()  # bounded: only orders the device's work
        return tensor

    def send_async(self, tensor: Tensor) -> NcclWork:
        """Sends to the other one of two ranks."""
        return self._begin(lambda pg: pg.send([tensor], 1 - self.rank, 0))

    def receive_async(self, tensor: Tensor) -> NcclWork:
        """Receives from the other one of two ranks."""
        return self._begin(lambda pg: pg.recv([tensor], 1 - self.rank, 0))  # bounded: work for the device

    def abort(self) -> None:
        """Aborts the communicator, once, on a background thread: its kernels take a while to notice."""
        with self._lock:
            is_first, self._is_ending = not self._is_ending, True
        if is_first:
            threading.Thread(target=self._abort, args=(self._pg,), daemon=True, name=f"abort-{self.name}").start()

    @property
    def is_busy(self) -> bool:
        return self._is_ending and not self._ended.is_set()

    def _enter_thread(self) -> None:
        use_device(self._device)

    def _on_abort(self) -> None:
        self.abort()

    def _begin(self, post: Callable[[Any], dist.Work]) -> NcclWork:
        self.token.check()
        return NcclWork(post(self._pg), self.token)

    def _abort(self, pg: Any) -> None:
        try:
            self._enter_thread()
            if pg is not None:
                pg.abort()
        finally:
            self._ended.set()


class NcclWork:
    """Work of a device under way."""

    def __init__(self, work: dist.Work, token: AbortToken):
        self._work = work
        self._token = token

    def wait(self) -> None:
        self._token.check()
        self._work.wait()  # bounded: only orders the device's work

    def is_done(self) -> bool:
        """Whether the device has done it; does not wait."""
        return self._work.is_completed()
