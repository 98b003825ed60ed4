"""A group that reduces over a tree of streams: at most three connections a rank, whatever the group's size.

For the group of all ranks, which carries one vector a step. The sum of the whole group is made once, by the root, and
handed down as bytes: all ranks hold identical bits. Its order of summation follows from the places in the tree alone
(tree_place.py). It differs from gloo's order; but whatever training reads from this group are integers, flags, exact
sums and numbers with one contributor (trainer/entry_layout.py), which every order adds to the same bits.

A collective progresses in the caller's `wait`, on its thread; only a leaf sends its part at once. The streams belong to
one membership generation, are opened for it and end with it, so that nothing of an aborted collective is ever read.
Vectors move in segments, which several levels of the tree handle at a time.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.group import Group, Work, WorkThen
from parallel3d.parallel.stream import Stream, StreamSource
from parallel3d.parallel.tree_place import tree_place

SEGMENT_BYTES = 1 << 16
_HEADER = struct.Struct("<4sIQQQ")  # magic, operation, number of the collective, bytes of the vector, offset
_MAGIC = b"p3dt"

Combine = Callable[[Tensor, Tensor], Any]
"""Combines a segment with another rank's, in place of the first."""


def _add(own: Tensor, other: Tensor) -> None:
    own += other


def _take_larger(own: Tensor, other: Tensor) -> None:
    torch.maximum(own, other, out=own)


_OPERATIONS: tuple[Combine, ...] = (_add, _take_larger)


class TreeGroup(Group):
    """Ranks that are connected as a tree. `streams` must be those of one membership generation."""

    def __init__(
        self, *, name: str, rank: int, ranks: tuple[int, ...], streams: StreamSource, token: AbortToken
    ) -> None:
        super().__init__(name=name, rank=rank, ranks=ranks)
        place = tree_place(rank, self.size)
        self._token = token
        self._streams = streams
        self._num_posted = 0
        self._pending: deque[_TreeWork] = deque()
        self._child_ranks = tuple(ranks[child] for child in place.children)
        self._accepted: tuple[Stream, ...] | None = None
        self.parent: Stream | None = None if place.parent is None else streams.connect(ranks[place.parent])

    @property
    def children(self) -> tuple[Stream, ...]:
        """The streams of the children, in the order of summation; the first use waits for them."""
        if self._accepted is None:
            self._accepted = tuple(self._streams.accept(rank) for rank in self._child_ranks)
        return self._accepted

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._post(tensor, _add)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        self._post(tensor, _take_larger).wait()  # bounded: by the streams
        return tensor

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        total = tensor.detach().reshape(-1)
        part = total.chunk(self.size)[self.rank]
        return WorkThen(self._post(total, _add), lambda: output.copy_(part.view_as(output)))

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        own = _bytes_of(tensor.contiguous())
        gathered = own.new_zeros(self.size, len(own))
        gathered[self.rank] = own  # as bytes: a sum of floats would lose the sign of a zero

        def take() -> None:
            output.copy_(gathered.view(-1).view(output.dtype).view_as(output))

        return WorkThen(self._post(gathered, _add), take)

    def close(self) -> None:
        for stream in (*([self.parent] if self.parent else []), *(self._accepted or ())):
            stream.close()

    def wait_for(self, work: _TreeWork) -> None:
        """Finishes the collectives up to `work`, in the order in which they were posted."""
        assert len(self.children) == len(self._child_ranks)  # waits for their streams
        with torch.no_grad(), self._token.waiting(self.name, self.ranks):
            while not work.is_done:
                self._token.check()
                self._pending[0].finish()
                self._pending.popleft()

    def _post(self, tensor: Tensor, combine: Combine) -> Work:
        self._token.check()
        self._num_posted += 1
        work = _TreeWork(self, tensor, self._num_posted, combine)
        self._pending.append(work)
        if not self._child_ranks and len(self._pending) == 1:
            work.contribute()
        return work


class _TreeWork:
    """One reduction."""

    def __init__(self, group: TreeGroup, tensor: Tensor, number: int, combine: Combine):
        self._group = group
        self._tensor = tensor
        self._flat = tensor.detach().contiguous().view(-1)
        self._bytes: memoryview = _bytes_of(self._flat).numpy().data
        self._number = number
        self._combine = combine
        self._has_contributed = self.is_done = False

    def wait(self) -> None:
        self._group.wait_for(self)

    def contribute(self) -> None:
        """Adds up this rank's subtree and sends the sum to the parent."""
        self._has_contributed = True
        for header, part, segment in self._segments():
            for child in self._group.children:
                other = child.receive(header, len(segment))
                self._combine(part, torch.frombuffer(other, dtype=part.dtype))
            if self._group.parent is not None:
                self._group.parent.send(header, segment)

    def finish(self) -> None:
        """Takes the result from the parent and hands it on to the children."""
        if not self._has_contributed:
            self.contribute()
        for header, _, segment in self._segments():
            if self._group.parent is not None:
                segment[:] = self._group.parent.receive(header, len(segment))
            for child in self._group.children:
                child.send(header, segment)
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat.view_as(self._tensor))
        self.is_done = True

    def _segments(self) -> Iterator[tuple[bytes, Tensor, memoryview]]:
        """The header of each segment, and the segment as a tensor and as bytes."""
        size, width, code = len(self._bytes), self._flat.element_size(), _OPERATIONS.index(self._combine)
        for start in range(0, size, SEGMENT_BYTES):
            stop = min(start + SEGMENT_BYTES, size)
            header = _HEADER.pack(_MAGIC, code, self._number, size, start)
            yield header, self._flat[start // width : stop // width], self._bytes[start:stop]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
