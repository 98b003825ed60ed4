"""What the rest of the project asks of a group of ranks; and the group of one.

A group is an object handed to whoever needs it. Every call is collective: all members make it, in the same order.
Blocking calls raise GenerationEnded once the group's abort token is set. Implementations: gloo (comm/gloo.py), threads
of one process (testing/threads.py), and `SoloGroup`, which makes one rank the reference rather than a special case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from parallel3d.errors import ProtocolError


class Work(Protocol):
    """A collective under way. `wait` blocks until its tensors are final."""

    def wait(self) -> None: ...


class Group(ABC):
    """`size` ranks, of which this process is number `rank`; `ranks` are their global ranks."""

    waits_for_data = True
    """Whether `wait` returns when the data is there; else it only puts what the device is given next behind it."""

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
        """`output` (n,) becomes this rank's n-element part of the sum of `tensor` (size * n,), which is used up."""

    @abstractmethod
    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        """`output` (size * n,) becomes the parts `tensor` (n,) in rank order; `tensor` may be its place in `output`."""

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
        """The elementwise largest over the group, in place; blocking."""

    def abort(self) -> None:  # noqa: B027 - nothing is under way by default
        """Begins to end whatever is under way, without waiting: the membership generation is over."""

    @property
    def is_busy(self) -> bool:
        """Whether something that was begun may still write into tensors that it was given."""
        return False

    def close(self) -> None:  # noqa: B027 - nothing to close is a fine default
        """Gives the group's resources back. The group must not be used again."""


class WorkThen:
    """A collective, and what is done with its result when it has been waited for."""

    def __init__(self, work: Work, then: Callable[[], object]):
        self._work = work
        self._then = then

    def wait(self) -> None:
        self._work.wait()
        then, self._then = self._then, lambda: None  # lets go of the tensors that it needed
        then()


class DoneWork:
    """Nothing left to wait for."""

    def wait(self) -> None:
        return None


class AbsentGroup(Group):
    """The place in a group between two membership generations: it has a rank and a size, and every call is a defect."""

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
    """A group of one: every collective is a copy or nothing at all."""

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
