"""Plans which parameters share a bucket, and at which offsets. Pure.

A bucket is one flat buffer that is reduced, normed, clipped, updated and gathered in one piece. All of its parameters
are treated alike, so the treatment is its key: with or without weight decay; sharded over the tensor-parallel ranks,
replicated on them, or sharded with some rows on several ranks (fewer key heads than ranks); held by one stage, or by
the first and the last together. Parameters come in the order in which the backward pass finishes them, so that the
first bucket is full, and its reduction under way, while the rest of the backward pass still runs.

A tied embedding has a bucket of its own, the same on both stages, and it is their last one. So all ranks reduce their
stage's buckets before the one that two stages share, and no ring of ranks can wait for each other in different groups.
This costs no time: the first stage gets this gradient last, and the reduction can't end before it has.

Where n ranks share the optimizer state, the length is padded to a multiple of n x 64 elements, and each rank owns an
aligned range of equal length. n changes when replicas are lost; the offsets of the parameters never do. A matrix-wise
update rule needs whole matrices: its buckets are divided at parameter borders, into ranges of unequal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from parallel3d.parallel.sharding import ParamSharding, TpShard

ALIGNMENT = 64
PARAM_ALIGNMENT = 16
"""Parameters begin at multiples of this number of elements: some kernels' results depend on the low 4 bits of an
address."""


@dataclass(frozen=True, kw_only=True)
class BucketKey:
    """The treatment that all parameters of a bucket have in common."""

    decay: bool
    """Whether weight decay applies."""
    tp_replicated: bool
    """Whether each tensor-parallel rank holds all of every parameter."""
    partial_grad: bool
    """Whether each tensor-parallel rank has only its own tokens' part of the gradients."""
    copies: int = 1
    """Number of neighbouring tensor-parallel ranks that hold the same `shared` elements, each with a part of their
    gradient."""
    tied: bool = False
    """Held by the first and by the last stage."""
    is_matrix_wise: bool = False
    """Updated as whole matrices: ranges end at parameter borders only."""


@dataclass(frozen=True, kw_only=True)
class ParamSlot:
    """The place of a parameter's local share in its bucket, in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    shared: tuple[range, ...] = ()
    """Ranges of the bucket's elements that several tensor-parallel ranks hold."""

    @property
    def length(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """One bucket: its parameters in order."""

    key: BucketKey
    param_slots: tuple[ParamSlot, ...]

    @property
    def num_elements(self) -> int:
        """Elements of parameters, without padding at the end."""
        return self.param_slots[-1].offset + self.param_slots[-1].length

    def length(self, num_ranges: int) -> int:
        """Elements, with the padding that makes `num_ranges` equal, aligned ranges."""
        return padded_length(self.num_elements, 1 if self.key.is_matrix_wise else num_ranges)

    def capacity(self, max_ranges: int) -> int:
        """The largest length for 1 to `max_ranges` ranges: at most max_ranges x 64 elements of padding."""
        return max(self.length(num_ranges) for num_ranges in range(1, max_ranges + 1))

    @property
    def shared(self) -> tuple[range, ...]:
        """The elements that `key.copies` ranks hold."""
        return tuple(span for param_slot in self.param_slots for span in param_slot.shared)

    def counted(self, span: range, tp_rank: int) -> tuple[range, ...]:
        """The parts of `span` that rank `tp_rank` counts in sums over the model. Of ranks that hold the same elements
        the first counts them."""
        if self.key.tp_replicated:
            return (span,) if tp_rank == 0 else ()
        if tp_rank % self.key.copies == 0:
            return (span,)
        return _without(span, self.shared)

    def range_of(self, number: int, num_ranges: int) -> range:
        """The elements of range `number` of `num_ranges`; some ranges of a matrix-wise bucket may be empty."""
        if self.key.is_matrix_wise:
            return range(self._border(number, num_ranges), self._border(number + 1, num_ranges))
        return equal_range(self.num_elements, number, num_ranges)

    def _border(self, number: int, num_ranges: int) -> int:
        """The first element of range `number`: the parameter border nearest to that of equal ranges."""
        length = self.length(num_ranges)
        if number in (0, num_ranges):
            return length if number else 0
        borders = (*(param_slot.offset for param_slot in self.param_slots), length)
        return min(borders, key=lambda border: abs(border * num_ranges - number * length))


def padded_length(num_elements: int, num_ranges: int) -> int:
    """Elements of a bucket with the padding that makes `num_ranges` equal, aligned ranges."""
    unit = num_ranges * ALIGNMENT
    return -(-num_elements // unit) * unit


def equal_range(num_elements: int, number: int, num_ranges: int) -> range:
    """The elements of range `number` of `num_ranges` equal ones."""
    size = padded_length(num_elements, num_ranges) // num_ranges
    return range(number * size, (number + 1) * size)


def plan_buckets(
    shardings: Sequence[ParamSharding],
    *,
    tp_size: int,
    bucket_elements: int,
    decay_norms_and_biases: bool,
    matrix_wise: bool = False,
) -> tuple[BucketPlan, ...]:
    """Plans buckets of about `bucket_elements` for parameters in forward order. Buckets come in backward order, a tied
    one last. `matrix_wise`: the layers' matrices have buckets of their own."""
    # One pass, last parameter first. Each key has one open bucket, which the parameters with that key join. An open
    # bucket that has grown to `bucket_elements` is complete and takes its place in the order of reductions, so buckets
    # are ordered by their last gradient, not by their first. Those still open at the end follow. The sort is stable: it
    # only moves the tied one to the end.
    open_buckets: dict[BucketKey, list[ParamSlot]] = {}
    full: list[BucketPlan] = []
    for sharding in reversed(shardings):
        key = BucketKey(
            decay=decay_norms_and_biases or not sharding.is_norm_or_bias,
            tp_replicated=sharding.dim is None,
            partial_grad=sharding.partial_grad,
            copies=sharding.copies(tp_size),
            tied=sharding.tied,
            is_matrix_wise=matrix_wise and sharding.is_layer_matrix,
        )
        param_slots = open_buckets.setdefault(key, [])
        end = param_slots[-1].offset + param_slots[-1].length if param_slots else 0
        offset = -(-end // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
        shape, shared = sharding.local_shape(tp_size), _shared_elements(sharding, tp_size, offset)
        param_slots.append(ParamSlot(name=sharding.name, offset=offset, shape=shape, shared=shared))
        if offset + param_slots[-1].length >= bucket_elements:
            full.append(BucketPlan(key=key, param_slots=tuple(open_buckets.pop(key))))
    rest = (BucketPlan(key=key, param_slots=tuple(param_slots)) for key, param_slots in open_buckets.items())
    return tuple(sorted((*full, *rest), key=lambda plan: plan.key.tied))


def _shared_elements(sharding: ParamSharding, tp_size: int, offset: int) -> tuple[range, ...]:
    """The elements of the rows that several ranks hold, for a parameter at `offset`; the same on every rank."""
    if sharding.copies(tp_size) == 1:
        return ()
    assert sharding.dim == 0, sharding.name
    row = prod(sharding.shape[1:])
    return tuple(
        range(offset + run.local_start * row, offset + (run.local_start + run.length) * row)
        for run in sharding.runs(TpShard(rank=0, size=tp_size))
        if run.copies > 1
    )


def _without(span: range, holes: Sequence[range]) -> tuple[range, ...]:
    """The parts of `span` between the holes, which are in order."""
    parts, start = [], span.start
    for hole in holes:
        parts.append(range(start, min(hole.start, span.stop)))
        start = max(start, hole.stop)
    return tuple(part for part in (*parts, range(start, span.stop)) if part)
