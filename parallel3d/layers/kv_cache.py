"""Keys and values of earlier tokens, so that a text's next token costs the work of one token (docs/generate.md).

A row of the cache is a sequence. A layer with a window of w keys keeps the last w of them, in a ring::

    capacity 6, no window    positions 0 1 2 3 4 .      window 4, after position 5    4 5 2 3
                                                        position p is at p % 4

Rows may be of different lengths: a step gives each row one token, at its own position, and hides what is not there yet.
A sequence's first tokens are computed as in training, all at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.rotary import RotaryTable


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSlots:
    """Where the next token of each of the first rows goes, in all layers that keep as many tokens."""

    rows: Tensor
    slots: Tensor
    """(rows,) int64, both."""

    @staticmethod
    def of(lengths: tuple[int, ...], num_slots: int, device: torch.device | str) -> RowSlots:
        """The slots of tokens at positions `lengths` in rings of `num_slots`."""
        slots = torch.tensor([length % num_slots for length in lengths], dtype=torch.int64, device=device)
        return RowSlots(rows=torch.arange(len(lengths), device=device), slots=slots)


class KeyValueCache:
    """Keys and values of up to `num_rows` sequences of up to `capacity` tokens, layer by layer.

    A layer's memory is taken when it has its first keys, in their format.
    """

    def __init__(self, num_rows: int, capacity: int):
        self.num_rows, self.capacity = num_rows, capacity
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for layer in self._layers.values() for part in layer)

    def num_slots(self, window: int | None) -> int:
        """Tokens of a sequence that a layer keeps."""
        return self.capacity if window is None else min(window, self.capacity)

    def begin(self, layer: str, row: int, k: Tensor, v: Tensor, window: int | None) -> None:
        """Keeps k and v (tokens, heads, size) of a sequence's first tokens."""
        num_slots = self.num_slots(window)
        first = max(0, k.shape[0] - num_slots)
        slots = torch.arange(first, k.shape[0], device=k.device) % num_slots
        for part, new in zip(self._parts(layer, k, num_slots), (k, v)):
            part[row, :, slots] = new[first:].transpose(0, 1)

    def extend(
        self, layer: str, k: Tensor, v: Tensor, slots: RowSlots, num_visible: int, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Adds k and v (rows, heads, size) at the slots of the first rows; returns views (rows, heads, num_visible,
        size) of these rows' keys and values."""
        parts = self._parts(layer, k, self.num_slots(window))
        for part, new in zip(parts, (k, v)):
            part[slots.rows, :, slots.slots] = new
        keys, values = (part[: k.shape[0], :, :num_visible] for part in parts)
        return keys, values

    def move_row(self, source: int, target: int) -> None:
        """Replaces a row by another one."""
        for layer in self._layers.values():
            for part in layer:
                part[target] = part[source]

    def _parts(self, layer: str, k: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        """(rows, heads, slots, size) for keys and for values; zeros, since what is hidden is multiplied by zero."""
        if layer not in self._layers:
            shape = (self.num_rows, k.shape[1], num_slots, k.shape[2])
            self._layers[layer] = (k.new_zeros(shape), k.new_zeros(shape))
        return self._layers[layer]


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedTokens(MicroBatch):
    """The first tokens of a new row, or the next token of each of the first rows."""

    cache: KeyValueCache
    row: int = 0
    """The row that begins."""
    lengths: tuple[int, ...] = ()
    """Tokens of each row before this one; empty where a row begins."""
    device: torch.device | str = "cpu"

    @property
    def begins(self) -> bool:
        return not self.lengths

    @cached_property
    def positions(self) -> Tensor:
        """(rows,) int64: of each row's next token."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.device)

    def rotary(self, table: RotaryTable) -> RotaryTable:
        """The rows of a table for these tokens, once for all layers."""
        if self.begins:
            return table
        if id(table) not in self._tables:
            self._tables[id(table)] = RotaryTable(table.cos[self.positions], table.sin[self.positions])
        return self._tables[id(table)]

    def attend(self, layer: str, q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None) -> Tensor:
        """Attention of each row's next token to all its tokens: q (1, rows, query heads, size), k and v (1, rows,
        key-value heads, size) -> as q."""
        num_slots = self.cache.num_slots(window)
        num_visible = min(max(self.lengths) + 1, num_slots)
        keys, values = self.cache.extend(layer, k[0], v[0], self._slots(num_slots), num_visible, window)
        grouped = q[0].unflatten(1, (k.shape[2], -1))  # the heads that share keys are queries of one head
        return _attend(grouped, keys, values, self._mask(num_visible), cap).flatten(1, 2).unsqueeze(0)

    def _slots(self, num_slots: int) -> RowSlots:
        if num_slots not in self._row_slots:
            self._row_slots[num_slots] = RowSlots.of(self.lengths, num_slots, self.device)
        return self._row_slots[num_slots]

    def _mask(self, num_visible: int) -> Tensor | None:
        """(rows, 1, 1, slots): True where a row has a key; None where all have all."""
        if min(self.lengths) + 1 >= num_visible:
            return None
        if num_visible not in self._masks:
            slots = torch.arange(num_visible, device=self.device)
            self._masks[num_visible] = (slots <= self.positions.unsqueeze(1))[:, None, None]
        return self._masks[num_visible]

    @cached_property
    def _tables(self) -> dict[int, RotaryTable]:
        return {}

    @cached_property
    def _row_slots(self) -> dict[int, RowSlots]:
        return {}

    @cached_property
    def _masks(self) -> dict[int, Tensor]:
        return {}


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float | None) -> Tensor:
    """q (rows, key-value heads, group, size), k and v (rows, key-value heads, keys, size) -> as q."""
    if cap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide) * q.shape[-1] ** -0.5, k.to(wide).transpose(-1, -2)).div_(cap).tanh_().mul_(cap)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, -1).to(v.dtype), v)
