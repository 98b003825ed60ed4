"""One range of a bucket's optimizer state, as a rank holds it: as its owner or as its backup."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.kernels.update_table import Piece


class Shard:
    """Master weights, the update rule's states and reduced gradients of one range."""

    def __init__(self, span: range, *, master: Tensor, states: Tensor, grad_dtype: torch.dtype):
        self.span = slice(span.start, span.stop)
        self.master = master
        """(elements,) in the policy's state format: a copy, or the weights themselves where that is their format."""
        self.states = states
        """(num_states, elements), in the order of the update rule's row."""
        self.grads = master.new_empty(0, dtype=grad_dtype)
        """(elements,) in the policy's gradient format: the sum over all micro-batches of the iteration. Empty until the
        bucket installs the shard: with one range, the bucket's own buffer serves."""
        self.sums = self.grads
        """What the reduction writes: the gradients, or the integers that they are made of."""
        self.pieces: tuple[Piece, ...] = ()
        """Of which the table is made, where one kernel updates the range."""
        self.gathered: Tensor | None = None
        """For a matrix-wise rule, between the reduction and the update: the gradients and states of all tensor-parallel
        ranks; else None."""

    def read(self, start: int, stop: int, *, with_master: bool) -> Tensor:
        """Copies elements start..stop of the bucket: states, then master weights, (rows, stop - start)."""
        part = self._part(start, stop)
        rows = [self.states[:, part], *([self.master[part].unsqueeze(0)] if with_master else [])]
        return torch.cat(rows)

    def write(self, start: int, values: Tensor) -> None:
        """Writes what another rank has read, (rows, n), to the n elements from `start` on."""
        part = self._part(start, start + values.shape[1])
        num_states = len(self.states)
        self.states[:, part] = values[:num_states]
        if len(values) > num_states:
            self.master[part] = values[num_states]

    def copy_from(self, other: Shard, start: int, stop: int) -> None:
        """Copies those of elements start..stop that both hold from a shard on the same rank."""
        start, stop = max(start, self.span.start, other.span.start), min(stop, self.span.stop, other.span.stop)
        if start < stop:
            mine, theirs = self._part(start, stop), other._part(start, stop)
            self.states[:, mine] = other.states[:, theirs]
            if self.master[mine].data_ptr() != other.master[theirs].data_ptr():  # else both are views of the weights
                self.master[mine] = other.master[theirs]

    def _part(self, start: int, stop: int) -> slice:
        return slice(start - self.span.start, stop - self.span.start)
