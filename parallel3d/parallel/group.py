"""The interface of a group of ranks, and the group of one.

Groups are passed as arguments, never looked up. Every call is collective: all members make it, in the same order.
Blocking calls raise GenerationEnded once the group's abort token is set. Implementations: gloo, NCCL, shared memory,
threads of one process (inprocess/thread_group.py), and `SoloGroup`, which makes one rank the reference rather than a
special case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from parallel3d.errors import ProtocolError
from parallel3d.parallel.abort import AbortToken


class Work(Protocol):
    """A collective under way; `wait` blocks until its tensors are final."""

    def wait(self) -> None: ...


class Closable(Protocol):
    """What every group of ranks can do at its end."""

    def abort(self) -> None: ...

    @property
    def is_busy(self) -> bool: ...

    def close(self) -> None: ...


class Group(ABC):
    """`size` ranks, of which this process is number `rank`; `ranks` are their global ranks."""

    waits_for_data = True
    """True if `wait` returns once the data is there; otherwise it only orders the device's later work after it."""

    runs_in_background = True
    """True if a collective goes on between its call and its wait."""

    reduces_parts = False
    """Whether `reduce_parts_async` is there: every rank can see what all others contribute to any part of a sum."""

    def __init__(self, *, name: str, rank: int, ranks: tuple[int, ...]):
        self.name = name
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)

    @abstractmethod
    def all_reduce_async(self, tensor: Tensor) -> Work:
        """Sums `tensor` over the group, in place: the same bits on every rank."""

    @abstractmethod
    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        """Writes this rank's part (n,) of the sum of `tensor` (size * n,) to `output`; overwrites `tensor`."""

    def reduce_parts_async(self, outputs: Mapping[int, Tensor], tensor: Tensor) -> Work:
        """Like `reduce_scatter_async`, but writes any parts (n,) of the sum, each to the tensor of its number: the same
        bits on every rank that asks for a part."""
        raise ProtocolError(f"group {self.name} can't reduce {sorted(outputs)}: a rank gets its own part")

    @abstractmethod
    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        """Writes the ranks' `tensor`s (n,) in rank order to `output` (size * n,), of which `tensor` may be a view."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.all_reduce_async(tensor).wait()
        return tensor

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        self.reduce_scatter_async(output, tensor).wait()
        return output

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        self.all_gather_async(output, tensor).wait()
        return output

    @abstractmethod
    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Takes the elementwise maximum over the group, in place; blocking."""

    def abort(self) -> None:  # noqa: B027 - nothing is under way by default
        """Begins to abort what is under way, without waiting: the membership generation is over."""

    @property
    def is_busy(self) -> bool:
        """True while a collective may still write to its tensors."""
        return False

    @property
    def state(self) -> str:
        """What members compare to find out whether they can take the group into the next generation: its connections
        stay if all states are the same. "" where this rank can't, as by default."""
        return ""

    def renew(self, name: str, token: AbortToken) -> None:
        """Takes the group into another generation, with its connections: all members do, or none."""
        raise ProtocolError(f"group {self.name} can't be kept for {name}, {token.aborted=}")

    def close(self) -> None:  # noqa: B027 - nothing to close by default
        """Releases the group's resources; the group must not be used again."""


class WorkThen:
    """A collective, and a function that `wait` calls after it."""

    def __init__(self, work: Work, then: Callable[[], object]):
        self._work = work
        self._then = then

    def wait(self) -> None:
        self._work.wait()
        then, self._then = self._then, lambda: None  # releases the tensors that it needed
        then()


class DoneWork:
    """A collective that is already complete."""

    def wait(self) -> None:
        return None


class AbsentGroup(Group):
    """A placeholder between two membership generations: it has a rank and a size, and every call is a defect."""

    def all_reduce_async(self, tensor: Tensor) -> Work:
        raise self._defect()

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        raise self._defect()

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        raise self._defect()

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        raise self._defect()

    def _defect(self) -> ProtocolError:
        return ProtocolError(f"group {self.name} is used outside of a membership generation")


class SoloGroup(Group):
    """A group of one: every collective is a copy or a no-op."""

    def __init__(self, *, name: str = "solo", rank: int = 0):
        super().__init__(name=name, rank=0, ranks=(rank,))

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return DoneWork()

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        _copy_unless_same(output, tensor)
        return DoneWork()

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        _copy_unless_same(output, tensor)
        return DoneWork()

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return tensor


def _copy_unless_same(output: Tensor, tensor: Tensor) -> None:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
