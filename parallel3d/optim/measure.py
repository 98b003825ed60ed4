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

from parallel3d.accelerator import blocks_of
from parallel3d.optim.state_norms import StateNorms
from parallel3d.parallel.staged_group import HostCopy
from parallel3d.precision.fixed_point import UNIT_LOG2, ExactSum

_BLOCK = 1 << 16
_COARSE_LOG2, _FINE_LOG2 = 20, 60
"""Two digits of an element: whole multiples of 2**-20, and what is left in multiples of 2**-60."""


def measure_state(weights: Tensor, exp_avg_sq: Tensor | None) -> Tensor:
    """Norms of `weights` (n,) and v (n,), n > 0, in any float formats: (3,) float64 on their device, in the order of
    StateNorms. Sums are in fp32 or wider, over blocks in fp64. Without v, measures only the weights."""
    size = max(map(len, blocks_of(weights, _BLOCK)))
    norms = torch.stack([torch.linalg.vector_norm(_wide(block)) for block in weights.split(size)]).double()
    if exp_avg_sq is None:
        return torch.stack([norms.square().sum(), *torch.zeros_like(norms[:1]).expand(2)])
    variance = torch.stack([block.sum().double() for block in _roots(exp_avg_sq, size)]).sum()
    return torch.stack([norms.square().sum(), variance, _largest_root(exp_avg_sq).double()])


def measure_state_exactly(weights: Tensor, exp_avg_sq: Tensor | None) -> StateNorms:
    """The same with exact sums; waits for a device."""
    squares = (block.double().square() for block in weights.split(_BLOCK))  # digits of more elements would overflow
    if exp_avg_sq is None:
        return StateNorms(squared_weights=_exact_sum(squares))
    return StateNorms(
        squared_weights=_exact_sum(squares),
        variance=_exact_sum(_roots(exp_avg_sq, _BLOCK)),
        variance_max=HostCopy(_largest_root(exp_avg_sq)).read().item(),
    )


def norms_of(numbers: list[float]) -> StateNorms:
    """The norms that `measure_state` has computed."""
    squared, total, largest = numbers
    return StateNorms(squared_weights=ExactSum.of([squared]), variance=ExactSum.of([total]), variance_max=largest)


def _largest_root(exp_avg_sq: Tensor) -> Tensor:
    return torch.sqrt(_wide(exp_avg_sq.max()))


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
