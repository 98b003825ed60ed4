"""Lion's formula in Triton: `Lion.update_block` on fp32 values, operation by operation."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update_values(weight, states, grad, scalars):
    """`scalars` are those of `Lion.scalars`."""
    beta1, rest1, beta2, rest2, rate, decay = scalars
    (m,) = states
    mean = m * beta1 + grad * rest1
    sign = tl.where(mean > 0, 1.0, tl.where(mean < 0, -1.0, 0.0))  # 0 for NaN too
    return weight * decay - sign * rate, (m * beta2 + grad * rest2,)
