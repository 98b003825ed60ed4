"""Copies between a device and the host, and host collectives for device tensors.

A copy to the host begins without waiting: the reader waits, once, for the work that the device had been given by then.
Pinned memory comes from torch's cache, so it is allocated only a few times. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel3d.parallel.group import Group, Work


class HostCopy:
    """A copy of a tensor in host memory, or the tensor itself if it is there already."""

    def __init__(self, tensor: Tensor):
        self._host, self._copied = tensor.detach(), None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """Waits for the copy and returns it."""
        if self._copied is not None:
            self._copied.synchronize()  # bounded: the end of a generation aborts what the device waits for
        return self._host


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copies a host tensor to `device`; the device's later work waits for it, the host does not."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


class StagedGroup(Group):
    """Collectives of device tensors over a host group: a copy to the host, and a copy back in `wait`.

    For several ranks on one GPU, which NCCL does not support. Starting a collective waits for the device.
    """

    def __init__(self, host: Group):
        super().__init__(name=host.name, rank=host.rank, ranks=host.ranks)
        self._host = host

    def all_reduce_async(self, tensor: Tensor) -> Work:
        host = self._copy(tensor)
        return _StagedWork(self._host.all_reduce_async(host), lambda: tensor.copy_(host))

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        part = torch.empty(output.shape, dtype=output.dtype)
        return _StagedWork(
            self._host.reduce_scatter_async(part, self._copy(tensor).view(-1)), lambda: output.copy_(part)
        )

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        whole = torch.empty(output.shape, dtype=output.dtype)
        return _StagedWork(self._host.all_gather_async(whole, self._copy(tensor)), lambda: output.copy_(whole))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._host.all_reduce_max(self._copy(tensor)))

    def abort(self) -> None:
        """Aborts the host group. Collectives write to host copies only, so the group is never busy."""
        self._host.abort()

    def close(self) -> None:
        self._host.close()

    @staticmethod
    def _copy(tensor: Tensor) -> Tensor:
        """Returns a contiguous host copy that this group owns."""
        copy = HostCopy(tensor).read()
        return copy if tensor.is_cuda else copy.clone(memory_format=torch.contiguous_format)


class _StagedWork:
    def __init__(self, work: Work, copy_back: Callable[[], object]):
        self._work = work
        self._copy_back: Callable[[], object] | None = copy_back

    def wait(self) -> None:
        self._work.wait()
        if self._copy_back is not None:
            with torch.no_grad():
                self._copy_back()
            self._copy_back = None
