"""Sums of gradients: a worker's own over its slots, and the reduced ones of all workers.

    backward of a slot -> .grad of each parameter -> own sums (kept until the step is committed)
        -> a copy, all-reduced a bucket at a time while the last slot's backward pass goes on -> .grad: the mean

The all-reduce works on a copy because a loss may leave it half done: the survivors then reduce their own sums again.
The own sums of a step's only slot are autograd's gradients themselves: they are weighted as they are copied.
With exact sums (precision/exact_sums.py) the own sums are int64 fixed point, the same bits in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor, nn

from parallel3d.errors import GenerationEnded, UserError
from parallel3d.parallel.group import Group, Work
from parallel3d.precision.exact_sums import add_and_clear, write_floats
from parallel3d.precision.fixed_point import FixedPoint

BUCKET_BYTES = 25 * 2**20
"""As torch's DistributedDataParallel has them."""
HALVES = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class SumBucket:
    """Parameters whose gradients are reduced together."""

    parameters: list[nn.Parameter]
    exact: Tensor | None
    """This worker's sums (n,) int64, with exact sums."""
    reduced: Tensor
    """The mean over all workers (n,), once the reduction is over."""
    stale: set[nn.Parameter] = field(default_factory=set)
    """Parameters whose part of `own` is from an earlier step."""
    single: dict[nn.Parameter, tuple[Tensor, float]] = field(default_factory=dict)
    """Gradients that are all of this step's so far, and their weights; their parts of `own` are stale."""
    waits_for: set[nn.Parameter] = field(default_factory=set)
    """Parameters that have no gradient of the last slot yet."""
    in_flight: tuple[Work, Tensor] | None = None

    @cached_property
    def own(self) -> Tensor:
        """This worker's sums (n,), made when there is something to add; with exact sums the scratch of one slot."""
        return torch.zeros_like(self.reduced)

    @cached_property
    def views(self) -> dict[nn.Parameter, Tensor]:
        """The part of `own` of each parameter."""
        return dict(zip(self.parameters, _parts(self.own, self.parameters)))

    def begin(self) -> None:
        """Begins the sums of a step."""
        self.stale = set(self.parameters)
        self.single.clear()

    def add(self, parameter: nn.Parameter, gradient: Tensor, weight: float) -> None:
        """Adds `weight` times a gradient to the own sums."""
        if (first := self.single.pop(parameter, None)) is not None:
            self.add(parameter, *first)
        if parameter in self.stale:
            _write_product(self.views[parameter], gradient, weight)
            self.stale.discard(parameter)
        else:
            self.views[parameter].add_(gradient, alpha=weight)

    def keep(self, parameter: nn.Parameter, gradient: Tensor, weight: float) -> None:
        """Adds one that is likely to stay alone, as it is."""
        if parameter not in self.stale or parameter in self.single or gradient.dtype != self.reduced.dtype:
            self.add(parameter, gradient, weight)
        else:
            self.single[parameter] = gradient, weight

    def write(self, scale: float) -> None:
        """Writes `scale` times the own sums to `reduced`."""
        if len(self.single) == len(self.parameters):
            for parameter, part in zip(self.parameters, _parts(self.reduced, self.parameters)):
                gradient, weight = self.single[parameter]
                torch.mul(gradient, scale * weight, out=part)
            return
        for parameter in list(self.single):
            self.add(parameter, *self.single.pop(parameter))
        for parameter in self.stale:
            self.views[parameter].zero_()
        self.stale.clear()
        torch.mul(self.own, scale, out=self.reduced)


SPARSE = (
    "a parameter has a sparse gradient, and elastic sums are dense: make the layer without sparse=True "
    "(nn.Embedding, nn.EmbeddingBag), and use an optimizer for dense gradients"
)
ONE_PASS = (
    "an elastic step takes one backward pass for each batch: add the losses and call backward() once, use an optimizer "
    "that calls no closure several times (as LBFGS and SAM do), and use_reentrant=False in torch.utils.checkpoint"
)
OUTSIDE = f"backward() outside of an elastic step, or after its batch was done, would lose these gradients; {ONE_PASS}"
TOO_LATE = f"a parameter has another gradient after its sum was sent to the other workers; {ONE_PASS}"


class GradientSums:
    """The gradients of `parameters` over one step after the other."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, exact: bool, bucket_bytes: int = BUCKET_BYTES):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise UserError("the model has no parameter that requires a gradient")
        self.exact = exact
        self._buckets = [_make_bucket(group, exact) for group in _split(self.parameters[::-1], bucket_bytes)]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._weight = 0.0
        self._num_samples = 1
        self._fixed = FixedPoint(shift=0, largest=0.0)
        self._group: Group | None = None
        self._next = 0
        """The first bucket whose reduction has not begun; None of them begins before the one before it."""
        self.is_slot_open = False
        self.on_gradient: Callable[[], None] = lambda: None
        """Called within the backward pass, once for each gradient."""
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._take)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def begin_step(self, num_samples: int, fixed: FixedPoint) -> None:
        """Begins the sums of a step of `num_samples`, which may become fewer."""
        self.forget_reduction(is_aborted=False)
        self._num_samples, self._fixed = num_samples, fixed
        for bucket in self._buckets:
            bucket.begin()
            if bucket.exact is not None:
                bucket.exact.zero_()
                bucket.own.zero_()
                bucket.stale.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def set_num_samples(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def begin_slot(self, weight: float, group: Group | None) -> None:
        """Takes the gradients of the next backward passes times `weight`; 0: leaves them out. `group`: this is the last
        slot, so that the reduction over it begins with the first bucket that is complete."""
        self._weight, self.is_slot_open = weight, True
        self._group = None if self.exact else group
        for bucket in self._buckets:
            bucket.waits_for = set(bucket.parameters)

    def end_slot(self) -> None:
        """Ends a slot, all of whose backward passes are over."""
        self._weight, self.is_slot_open = 0.0, False
        if not self.exact:
            return
        for bucket in self._buckets:
            assert bucket.exact is not None
            if not add_and_clear(bucket.exact, bucket.own, self._fixed):
                raise UserError("a gradient is infinite or not a number, which exact sums do not hold")

    @torch.no_grad()
    def reduce(self, group: Group) -> None:
        """Reduces what has not begun to be reduced, and waits until all is done. Raises GenerationEnded."""
        for bucket in self._buckets[self._next :]:
            self._begin_reduction(bucket, group)
        for bucket in self._buckets:
            assert bucket.in_flight is not None
            bucket.in_flight[0].wait()

    @torch.no_grad()
    def publish(self) -> None:
        """Makes the means over the step's samples the gradients of the parameters."""
        for bucket in self._buckets:
            assert bucket.in_flight is not None
            if bucket.exact is not None:
                write_floats(bucket.reduced, bucket.in_flight[1], self._fixed)
            if self.exact:
                bucket.reduced.mul_(1.0 / max(1, self._num_samples))
            bucket.single.clear()
        self.hand_out()

    @torch.no_grad()
    def hand_out(self) -> None:
        """Makes the reduced gradients those of the parameters."""
        for bucket in self._buckets:
            for parameter, part in zip(bucket.parameters, _parts(bucket.reduced, bucket.parameters)):
                parameter.grad = part.to(parameter.dtype)

    def forget_reduction(self, *, is_aborted: bool) -> None:
        """Leaves a reduction; one that was aborted may still write to its buffers."""
        for bucket in self._buckets:
            if is_aborted and bucket.in_flight is not None and bucket.exact is None:
                bucket.reduced = torch.empty_like(bucket.reduced)
            bucket.in_flight = None
        self._next, self._group = 0, None

    def gradients(self) -> list[Tensor]:
        """The reduced gradients of a step that is committed."""
        return [bucket.reduced for bucket in self._buckets]

    @torch.no_grad()
    def load_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Takes the reduced gradients of a step from another worker."""
        for bucket, values in zip(self._buckets, gradients):
            bucket.reduced.copy_(values)
        self.hand_out()

    # --- within the backward pass ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """Adds a parameter's new gradient to the own sums. Raises UserError if these would not reach the step."""
        if not self.is_slot_open:
            raise UserError(OUTSIDE)
        gradient, parameter.grad = parameter.grad, None
        bucket = self._bucket_of[parameter]
        if gradient is not None and gradient.layout != torch.strided:
            raise UserError(SPARSE)
        if bucket.in_flight is not None:
            raise UserError(TOO_LATE)
        if self._weight and gradient is not None:
            add = bucket.keep if self._group else bucket.add  # a worker's last slot may be its only one
            add(parameter, gradient, self._weight)
        bucket.waits_for.discard(parameter)
        self.on_gradient()
        try:
            while self._group and self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
                self._begin_reduction(self._buckets[self._next], self._group)
        except GenerationEnded:  # the loop is within its backward pass: `reduce` finds the same
            self._group = None

    def _begin_reduction(self, bucket: SumBucket, group: Group) -> None:
        if bucket.exact is not None:
            copy = bucket.exact.clone()
        else:
            bucket.write(1.0 / max(1, self._num_samples))
            copy = bucket.reduced
        bucket.in_flight = group.all_reduce_async(copy), copy
        self._next += 1


def _write_product(view: Tensor, gradient: Tensor, weight: float) -> None:
    """Writes `gradient` times `weight` to `view`: in one pass over memory if they have one format."""
    if view.dtype == gradient.dtype:
        torch.mul(gradient, weight, out=view)
    else:
        view.copy_(gradient).mul_(weight)


def _split(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours of one kind, in buckets of at most `bucket_bytes` if they have several."""
    buckets: list[list[nn.Parameter]] = []
    for _, same in groupby(parameters, key=lambda parameter: (parameter.dtype, parameter.device)):
        size = bucket_bytes + 1
        for parameter in same:
            size += parameter.nbytes
            if size > bucket_bytes:
                buckets.append([])
                size = parameter.nbytes
            buckets[-1].append(parameter)
    return buckets


def _make_bucket(parameters: list[nn.Parameter], exact: bool) -> SumBucket:
    first, num_elements = parameters[0], sum(parameter.numel() for parameter in parameters)
    dtype = torch.float32 if first.dtype in HALVES else first.dtype
    reduced = torch.zeros(num_elements, dtype=dtype, device=first.device)
    sums = torch.zeros(num_elements, dtype=torch.int64, device=first.device) if exact else None
    return SumBucket(parameters=parameters, exact=sums, reduced=reduced)


def _parts(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The part of `flat` of each parameter, in its shape."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters)]
