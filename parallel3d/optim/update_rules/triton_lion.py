"""Lion's formula in Triton: `Lion.update_block` on fp32 values, operation by operation."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update_values(weight, m, s1, s2, grad, beta1, rest1, beta2, rest2, rate, decay, n7, n8):
    """The arguments behind `grad` are `Lion.scalars`."""
    mean = m * beta1 + grad * rest1
    sign = tl.where(mean > 0, 1.0, tl.where(mean < 0, -1.0, 0.0))  # 0 for NaN too
    m = m * beta2 + grad * rest2
    return weight * decay - sign * rate, m, s1, s2
