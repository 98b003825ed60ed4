"""Which parameters share a bucket, and where they stand in it. Pure.

A bucket is one flat buffer that is reduced, normed, clipped, updated and gathered in one piece. Everything in it is
treated alike, so its key is what decides the treatment: weight decay or not, cut over the tensor-parallel ranks or
held by all of them. Parameters come in the order in which the backward pass finishes them, so that the first bucket is
full, and on its way, while the rest of the backward pass still runs.

The length is padded to a multiple of num_ranges x 64 elements: each of the ranks that share the optimizer state owns an
aligned range of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from parallel3d.sharding import ParamSharding

ALIGNMENT = 64


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
    """One bucket: its parameters in order, and its length with padding."""

    key: BucketKey
    places: tuple[Place, ...]
    length: int

    def range_of(self, number: int, num_ranges: int) -> range:
        """The elements that rank `number` of `num_ranges` owns."""
        size = self.length // num_ranges
        return range(number * size, (number + 1) * size)


def plan_buckets(
    shardings: Sequence[ParamSharding],
    *,
    tp_size: int,
    num_ranges: int,
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
        offset = places[-1].offset + places[-1].length if places else 0
        places.append(Place(name=sharding.name, offset=offset, shape=sharding.local_shape(tp_size)))
        if offset + places[-1].length >= bucket_elements:
            full.append(_close(key, open_places.pop(key), num_ranges))
    return (*full, *(_close(key, places, num_ranges) for key, places in open_places.items()))


def _close(key: BucketKey, places: list[Place], num_ranges: int) -> BucketPlan:
    unit = num_ranges * ALIGNMENT
    used = places[-1].offset + places[-1].length
    return BucketPlan(key=key, places=tuple(places), length=-(-used // unit) * unit)
