"""Accelerators: the streams, events, pinned memory and waits that the code needs besides arithmetic.

The host is not an accelerator and needs none of this. A GPU is one, and "meta" counts as one: meta tensors take the
branches of a device, so that a rehearsal can count the work that a GPU would have. Copies take the accelerator as an
argument, so that a test can pass a stand-in over CPU tensors that shows their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

CopyDirection = Literal["to_host", "to_device"]
"""Each has a stream of its own: a copy to the host waits for the computation of what it copies, and copies to the
device should not stand in line behind it."""


def is_accelerator(device: torch.device | str) -> bool:
    """Whether code for devices is to be taken: kernels are started without waiting for them, and each start costs."""
    return torch.device(device).type != "cpu"


def host_of(device: torch.device) -> torch.device:
    """The device of host copies: meta tensors have no data there either."""
    return device if device.type == "meta" else torch.device("cpu")


DEVICE_BLOCK = 1 << 24
"""Elements that code for devices handles at once: starting a kernel on a small block takes longer than the kernel."""


def blocks_of(flat: Tensor, cpu_block: int) -> list[range]:
    """The elements of `flat` (n,) in blocks, on a CPU of `cpu_block` elements, which stay in its caches."""
    size = DEVICE_BLOCK if is_accelerator(flat.device) else cpu_block
    return [range(start, min(start + size, len(flat))) for start in range(0, len(flat), size)]


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Waits, on the host, until the stream has come to this point."""
        ...


class TimedEvent(Protocol):
    """A point in a stream's work whose time is kept; it can be recorded again. Nothing here makes the host wait."""

    def record(self, stream: Any) -> None:
        """Marks the end of the work that `stream` was given so far."""
        ...

    def query(self) -> bool:
        """Whether the stream has come to this point."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds of the device from this point to `end_event`; an error if it has not come to both."""
        ...


class DeviceStream(Protocol):
    """Work that a device does in order."""

    def record_event(self) -> Any:
        """Returns the `DeviceEvent` of the work given so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """Lets all later work of this stream wait for the event; the host does not wait."""
        ...


class Accelerator(ABC):
    """One device, as the calling thread sees it."""

    device: torch.device

    @abstractmethod
    def use(self) -> None:
        """Makes the device the calling thread's own."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work that the device was given."""

    @abstractmethod
    def current_stream(self) -> DeviceStream:
        """The stream that computes."""

    @abstractmethod
    def copy_stream(self, direction: CopyDirection) -> DeviceStream:
        """A stream for copies alone."""

    @abstractmethod
    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """A context whose work, and whose new tensors, belong to `stream`."""

    @abstractmethod
    def keep_for(self, tensor: Tensor, stream: DeviceStream) -> None:
        """Keeps the memory of a tensor that is dropped until `stream` has done the work that it was given by then."""

    @abstractmethod
    def pinned(self, tensor: Tensor) -> Tensor:
        """A host tensor in pinned memory: itself if it is there already."""

    @abstractmethod
    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new host tensor in pinned memory, from torch's cache of it."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies between device and host in the current stream; the host does not wait."""

    @abstractmethod
    def timed_event(self) -> TimedEvent:
        """A new event whose time is kept, not recorded yet."""

    @abstractmethod
    def spin(self, seconds: float) -> None:
        """Keeps the current stream busy for about so long, for injected faults; the host waits the first time only."""


MEASURED_CYCLES = 20_000_000
"""Of a GPU's clock, in some 10 ms."""


class CudaAccelerator(Accelerator):
    """A CUDA device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._copy_streams: dict[CopyDirection, torch.cuda.Stream] = {}
        self._cycles_per_s: float | None = None

    def use(self) -> None:
        torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def current_stream(self) -> DeviceStream:
        return torch.cuda.current_stream(self.device)

    def copy_stream(self, direction: CopyDirection) -> DeviceStream:
        if direction not in self._copy_streams:
            self._copy_streams[direction] = torch.cuda.Stream(self.device)
        return self._copy_streams[direction]

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def keep_for(self, tensor: Tensor, stream: DeviceStream) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        tensor.record_stream(stream)

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def timed_event(self) -> TimedEvent:
        return torch.cuda.Event(enable_timing=True)

    def spin(self, seconds: float) -> None:
        if self._cycles_per_s is None:
            self._cycles_per_s = self._measure_cycles()
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def _measure_cycles(self) -> float:
        """Cycles a second of the clock by which `torch.cuda._sleep` counts, which no property of torch names."""
        start, end = self.timed_event(), self.timed_event()
        with torch.cuda.device(self.device):
            start.record(self.current_stream())
            torch.cuda._sleep(MEASURED_CYCLES)
            end.record(self.current_stream())
        self.synchronize()  # bounded: the end of a generation aborts what the device waits for
        return MEASURED_CYCLES / (start.elapsed_time(end) / 1000)


class MetaAccelerator(Accelerator):
    """Tensors without data: all work is done at once, what is read is zero, and a rehearsal may listen."""

    def __init__(self) -> None:
        self.device = torch.device("meta")
        self.reset()

    def reset(self) -> None:
        """Ends a rehearsal."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when the host waits."""
        self.on_kernel: Callable[[str, Sequence[Tensor], Sequence[Tensor]], None] = lambda name, reads, writes: None
        """Called with the name of a kernel that is not torch's, and the tensors that it reads and writes."""

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        self.on_wait()

    def current_stream(self) -> DeviceStream:
        return _MetaStream(self)

    def copy_stream(self, direction: CopyDirection) -> DeviceStream:
        return _MetaStream(self)

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        return nullcontext()

    def keep_for(self, tensor: Tensor, stream: DeviceStream) -> None:
        pass

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        pass

    def timed_event(self) -> TimedEvent:
        return _MetaEvent()

    def spin(self, seconds: float) -> None:
        pass


class _MetaEvent:
    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


class _MetaStream:
    def __init__(self, accelerator: MetaAccelerator):
        self._accelerator = accelerator

    def record_event(self) -> _MetaStream:
        return self

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        self._accelerator.synchronize()


@lru_cache
def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator behind `device`, one object for each; None for the host."""
    if device.type != "cuda":
        return MetaAccelerator() if is_accelerator(device) else None
    if device.index is None:
        return accelerator_of(torch.device("cuda", torch.cuda.current_device()))
    return CudaAccelerator(device)


def use_device(device: torch.device) -> None:
    """Makes `device` the calling thread's own; for a CPU there is nothing to do.

    To be the first call of each thread that may touch a device: otherwise CUDA makes a context for it on GPU 0, some
    0.5 GB for every rank of the host.
    """
    if (accelerator := accelerator_of(device)) is not None:
        accelerator.use()
