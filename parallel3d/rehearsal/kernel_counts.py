"""Kernels of a part of a step, by what they do: counts that can be added. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

WorkKind = Literal["product", "attention", "attention_backward", "elementwise", "collective"]


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """The work of one kernel."""

    name: str
    kind: WorkKind
    num_bytes: int
    """Bytes that it reads and writes; of a collective, bytes that this rank sends."""
    flops: int = 0
    narrowest: int = 0
    """The smallest of a product's three sizes."""
    is_aligned: bool = True
    """Whether the rows of a product's matrices begin at multiples of 16 bytes."""
    itemsize: int = 2
    """Bytes of an element of a product's factors."""


@dataclass(frozen=True, kw_only=True)
class KernelCounts:
    """The kernels of one part of a step."""

    works: Counter[KernelWork] = field(default_factory=Counter)
    num_waits: int = 0
    """Waits of the host for the device."""

    @property
    def num_kernels(self) -> int:
        return self.works.total()

    @property
    def elementwise_bytes(self) -> int:
        """Bytes that kernels other than products, attention and collectives read and write."""
        return sum(count * work.num_bytes for work, count in self.works.items() if work.kind == "elementwise")

    def flops(self, *kinds: WorkKind) -> int:
        return sum(count * work.flops for work, count in self.works.items() if work.kind in kinds)

    def __add__(self, other: KernelCounts) -> KernelCounts:
        works = self.works.copy()
        works.update(other.works)
        return KernelCounts(works=works, num_waits=self.num_waits + other.num_waits)

    def __sub__(self, other: KernelCounts) -> KernelCounts:
        works = self.works.copy()
        works.subtract(other.works)
        kept = Counter({work: count for work, count in works.items() if count})
        return KernelCounts(works=kept, num_waits=self.num_waits - other.num_waits)

    def times(self, number: int) -> KernelCounts:
        """The counts of `number` equal parts."""
        works = Counter({work: number * count for work, count in self.works.items()})
        return KernelCounts(works=works, num_waits=number * self.num_waits)
