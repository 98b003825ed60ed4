"""Gradients added as int64 fixed point: the same bits in any order, on any layout, after any failure.

Floating-point sums depend on their order, and the order depends on which rank handles which micro-batch. Here every
micro-batch's gradient is computed alone in a scratch buffer, rounded to a fixed unit (derived in `fixed_point.py`), and
added to an int64 total, over micro-batches and over ranks alike::

    backward of one micro-batch -> scratch (float) -> round -> total (int64) -> reduce-scatter of int64
        -> squared norm, in integers                 -> float again, for the update

Only the micro-batch itself is computed in floats, so layouts agree bit for bit if their kernels do: with equal
tensor-parallel size, micro-batch size and number of threads, and weights at aligned addresses (MKL's results depend on
the low 4 bits of an address).

All passes process the data in blocks that stay in the cache. One thread of an AMD EPYC needs 1 ns an element to add,
0.7 to convert back, 3.4 for the squares; a float addition from memory takes 0.1.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import isfinite

import torch
from torch import Tensor

from parallel3d.accelerator import blocks_of
from parallel3d.errors import UserError
from parallel3d.precision.fixed_point import UNIT_LOG2, ExactSum, FixedPoint

_BLOCK = 1 << 16
_DIGIT_BITS = 21  # three digits make an int64; the products of two digits of a block add up to 2**58 at most
_LOW = 2**_DIGIT_BITS - 1


def add_and_clear(total: Tensor, scratch: Tensor, fixed: FixedPoint) -> bool:
    """Adds one term, `scratch` (n,) of floats, to `total` (n,) int64 and zeroes it. Returns whether it was finite.

    Infinities and NaNs count as zero, so that the total does not depend on which rank had them. Raises UserError for
    an element beyond `fixed.largest`.
    """
    blocks = zip(_blocks(total), _blocks(scratch))
    return all([_add_block(sums, terms, fixed) for sums, terms in blocks])  # a list: every block must be added


def write_floats(out: Tensor, total: Tensor, fixed: FixedPoint) -> None:
    """Converts the sums in `total` (n,) int64 to floats, in `out` (n,) of any float format."""
    for values, sums in zip(_blocks(out), _blocks(total)):
        values.copy_(sums.to(torch.float64).mul_(2.0**-fixed.shift))


def sum_of_squares(total: Tensor, fixed: FixedPoint) -> ExactSum:
    """The sum of the squares of all elements of `total` (n,) int64, without any rounding."""
    square_units = 0
    for block in _blocks(total):
        digits = (block & _LOW, (block >> _DIGIT_BITS) & _LOW, block >> (2 * _DIGIT_BITS))
        pairs = list(combinations_with_replacement(enumerate(digits), 2))
        sums = torch.stack([_partial_sums(a * b) for (_, a), (_, b) in pairs]).tolist()
        for ((i, _), (j, _)), parts in zip(pairs, sums):
            product = sum(parts) << (_DIGIT_BITS * (i + j))
            square_units += product if i == j else 2 * product
    return ExactSum(units=square_units << (-UNIT_LOG2 - 2 * fixed.shift))


def _blocks(flat: Tensor) -> list[Tensor]:
    """`flat` (n,) in blocks; a device waits for the host after each."""
    return [flat[span.start : span.stop] for span in blocks_of(flat, _BLOCK)]


def _partial_sums(products: Tensor) -> Tensor:
    """Sums of `products` (n,) int64 over blocks short enough not to overflow, to be added up as Python's integers."""
    num_whole = len(products) // _BLOCK * _BLOCK
    return torch.cat([products[:num_whole].view(-1, _BLOCK).sum(1), products[num_whole:].sum().view(1)])


def _add_block(total: Tensor, scratch: Tensor, fixed: FixedPoint) -> bool:
    largest = _largest(scratch)
    finite = isfinite(largest)
    if not finite:
        largest = _largest(scratch.nan_to_num_(0.0, 0.0, 0.0))
    if largest > fixed.largest:
        raise UserError(
            f"a gradient of {largest:g} (a sum over a micro-batch's tokens) is beyond the {fixed.largest:g} that exact "
            "sums hold: the run has exploded. Lower the learning rate, or add gradients as floats (precision.sums; "
            'elastic.DataParallel(sums="float"))'
        )
    total += scratch.mul_(2.0**fixed.shift).round_().to(torch.int64)
    scratch.zero_()
    return finite


def _largest(values: Tensor) -> float:
    """The largest magnitude; NaN if there is a NaN."""
    low, high = torch.stack(torch.aminmax(values)).tolist()
    return max(-low, high)
