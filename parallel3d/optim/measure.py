"""Measures the size of weights and of Adam's second moment.

"Sequence Length Warmup" (Li et al. 2022, section 3) follows the l1 norm and the largest element of sqrt(v), where
v = beta2 v + (1 - beta2) g^2 without bias correction. It is the l1 norm so that single elements don't dominate the sum.

Ranges are measured block by block, so that the roots stay in a core's cache. With exact sums each element's square, and
each root, is rounded to a multiple of 2**-60, and these are added as integers: the same bits for every shard map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from parallel3d.accelerator import is_accelerator
from parallel3d.optim.state_norms import StateNorms
from parallel3d.parallel.staged_group import HostCopy
from parallel3d.precision.fixed_point import UNIT_LOG2, ExactSum

_BLOCK = 1 << 16
_DEVICE_BLOCK = 1 << 24
_COARSE_LOG2, _FINE_LOG2 = 20, 60
"""Two digits of an element: whole multiples of 2**-20, and what is left in multiples of 2**-60."""


def measure_state(weights: Tensor, exp_avg_sq: Tensor | None, *, exact: bool) -> StateNorms:
    """Norms of `weights` (n,) and v (n,), n > 0, in any float formats. Sums are in fp32 or wider, over blocks in fp64.

    Without v, measures only the weights.
    """
    # exact digits of more than _BLOCK would overflow
    size = _DEVICE_BLOCK if is_accelerator(weights.device) and not exact else _BLOCK
    roots = [] if exp_avg_sq is None else _roots(exp_avg_sq, size)
    largest = weights.new_zeros((), dtype=torch.float32) if exp_avg_sq is None else torch.sqrt(_wide(exp_avg_sq.max()))
    if exact:
        squares = (block.double().square() for block in weights.split(size))
        return StateNorms(
            squared_weights=_exact_sum(squares),
            variance=_exact_sum(roots),
            variance_max=HostCopy(largest).read().item(),
        )
    norms = torch.stack([torch.linalg.vector_norm(_wide(block)) for block in weights.split(size)]).double()
    sums = [block.sum().double() for block in roots]
    variance = torch.stack(sums).sum() if sums else torch.zeros_like(norms[0])
    squared, total, maximum = HostCopy(torch.stack([norms.square().sum(), variance, largest.double()])).read().tolist()
    return StateNorms(squared_weights=ExactSum.of([squared]), variance=ExactSum.of([total]), variance_max=maximum)


def _roots(exp_avg_sq: Tensor, size: int) -> Iterator[Tensor]:
    """sqrt(v) block by block in one scratch buffer, so each block is valid until the next: fresh memory for each would
    cost three times as much as the roots."""
    scratch = _wide(exp_avg_sq.new_empty(min(size, len(exp_avg_sq))))
    for block in exp_avg_sq.split(size):
        yield scratch[: len(block)].copy_(block).sqrt_()


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _exact_sum(blocks: Iterable[Tensor]) -> ExactSum:
    """The sum of elements in [0, 2**26), in blocks of up to 2**16: then no integer sum exceeds 2**62."""
    total = ExactSum()
    for block in blocks:
        scaled = block.double() * 2.0**_COARSE_LOG2
        if not torch.isfinite(scaled).all():
            total += ExactSum(rest=scaled.sum().item())
            continue
        coarse = scaled.floor()
        fine = ((scaled - coarse) * 2.0 ** (_FINE_LOG2 - _COARSE_LOG2)).round()
        for digit, log2 in ((coarse, _COARSE_LOG2), (fine, _FINE_LOG2)):
            total += ExactSum(units=int(digit.to(torch.int64).sum()) << (-UNIT_LOG2 - log2))
    return total
