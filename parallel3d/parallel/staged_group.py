"""Copies between a device and the host, and host collectives for device tensors.

A copy to the host begins without waiting: the reader waits, once, for the work that the device had been given by then.
Copies between stages run beside the computation, on streams of their own, one for each direction::

    compute    | forward 3 | forward 4          | forward 5 (waits for "input 5") |
    to_host    ............| output 3 |
    to_device  ... | input 5 |

Pinned memory comes from torch's cache, so it is allocated only a few times. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel3d.accelerator import Accelerator, DeviceEvent, accelerator_of, is_accelerator
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.group import Group, Work


class HostCopy:
    """A copy of a tensor in host memory, or the tensor itself if it is there already.

    `aside`: the copy does not keep the computation waiting; then nothing may write to the tensor until it was read.
    `accelerator` is the tensor's own unless a test passes another.
    """

    def __init__(self, tensor: Tensor, *, aside: bool = False, accelerator: Accelerator | None = None):
        accelerator = accelerator or accelerator_of(tensor.device)
        self._host, self._copied = tensor.detach(), None
        if accelerator is not None:
            self._copied = self._begin(accelerator, aside)

    def _begin(self, accelerator: Accelerator, aside: bool) -> DeviceEvent:
        source, stream = self._host, accelerator.current_stream()
        self._host = accelerator.empty_pinned(tuple(source.shape), source.dtype)
        if aside:
            computed, stream = stream.record_event(), accelerator.copy_stream("to_host")
            stream.wait_event(computed)
            accelerator.keep_for(source, stream)
        with accelerator.on(stream):
            accelerator.copy(self._host, source)
            copied: DeviceEvent = stream.record_event()
        return copied

    def read(self) -> Tensor:
        """Waits for the copy and returns it."""
        if self._copied is not None:
            self._copied.synchronize()  # bounded: the end of a generation aborts what the device waits for
        return self._host


def to_device(tensor: Tensor, device: torch.device | str, accelerator: Accelerator | None = None) -> Tensor:
    """Copies a host tensor to `device`, beside the computation; the device's later work waits for it, the host and the
    work that the device has do not. `accelerator` is the device's own unless a test passes another."""
    accelerator = accelerator or accelerator_of(torch.device(device))
    if accelerator is None:
        return tensor.to(device)
    stream, pinned = accelerator.copy_stream("to_device"), accelerator.pinned(tensor)
    with accelerator.on(stream):
        result = torch.empty_like(tensor, device=accelerator.device, memory_format=torch.contiguous_format)
        accelerator.copy(result, pinned)
        copied = stream.record_event()
    compute = accelerator.current_stream()
    compute.wait_event(copied)
    accelerator.keep_for(result, compute)
    return result


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

    @property
    def state(self) -> str:
        return self._host.state

    def renew(self, name: str, token: AbortToken) -> None:
        self._host.renew(name, token)
        self.name = name

    def close(self) -> None:
        self._host.close()

    @staticmethod
    def _copy(tensor: Tensor) -> Tensor:
        """Returns a contiguous host copy that this group owns."""
        copy = HostCopy(tensor).read()
        return copy if is_accelerator(tensor.device) else copy.clone(memory_format=torch.contiguous_format)


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
