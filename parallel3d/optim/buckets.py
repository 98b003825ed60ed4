"""Which parameters share a bucket, and where they stand in it. Pure.

A bucket is one flat buffer that is reduced, normed, clipped, updated and gathered in one piece. Everything in it is
treated alike, so its key is what decides the treatment: weight decay or not, cut over the tensor-parallel ranks or
held by all of them. Parameters come in the order in which the backward pass finishes them, so that the first bucket is
full, and on its way, while the rest of the backward pass still runs.

Where n ranks share the optimizer state the length is padded to a multiple of n x 64 elements: each owns an aligned
range of equal length. n changes when replicas are lost; the places of the parameters never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from parallel3d.sharding import ParamSharding

ALIGNMENT = 64
PLACE_ALIGNMENT = 16
"""Parameters begin at multiples of so many elements: some kernels' results depend on the address below 16 bytes."""


@dataclass(frozen=True, kw_only=True)
class BucketKey:
    """What all parameters of a bucket have in common."""

    decay: bool
    tp_replicated: bool
    partial_grad: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter's local share stands in its bucket, in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """One bucket: its parameters in order."""

    key: BucketKey
    places: tuple[Place, ...]

    @property
    def num_elements(self) -> int:
        """Elements of parameters, without padding at the end."""
        return self.places[-1].offset + self.places[-1].length

    def length(self, num_ranges: int) -> int:
        """Elements with the padding that makes `num_ranges` equal, aligned ranges."""
        unit = num_ranges * ALIGNMENT
        return -(-self.num_elements // unit) * unit

    def capacity(self, max_ranges: int) -> int:
        """The longest that the bucket gets with 1 to `max_ranges` ranges: at most max_ranges x 64 elements more."""
        return max(self.length(num_ranges) for num_ranges in range(1, max_ranges + 1))

    def range_of(self, number: int, num_ranges: int) -> range:
        """The elements of range `number` of `num_ranges`."""
        size = self.length(num_ranges) // num_ranges
        return range(number * size, (number + 1) * size)


def plan_buckets(
    shardings: Sequence[ParamSharding],
    *,
    tp_size: int,
    bucket_elements: int,
    decay_norms_and_biases: bool,
) -> tuple[BucketPlan, ...]:
    """Buckets of about `bucket_elements` for parameters in forward order; the buckets come in backward order."""
    open_places: dict[BucketKey, list[Place]] = {}
    full: list[BucketPlan] = []
    for sharding in reversed(shardings):
        key = BucketKey(
            decay=decay_norms_and_biases or not sharding.is_norm_or_bias,
            tp_replicated=sharding.dim is None,
            partial_grad=sharding.partial_grad,
        )
        places = open_places.setdefault(key, [])
        end = places[-1].offset + places[-1].length if places else 0
        offset = -(-end // PLACE_ALIGNMENT) * PLACE_ALIGNMENT
        places.append(Place(name=sharding.name, offset=offset, shape=sharding.local_shape(tp_size)))
        if offset + places[-1].length >= bucket_elements:
            full.append(BucketPlan(key=key, places=tuple(open_places.pop(key))))
    return (*full, *(BucketPlan(key=key, places=tuple(places)) for key, places in open_places.items()))
