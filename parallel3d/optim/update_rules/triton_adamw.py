"""AdamW's formula in Triton: `AdamW.update_block` on fp32 values, operation by operation."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update_values(weight, states, grad, scalars):
    """`scalars` are those of `AdamW.scalars`."""
    beta1, rest1, beta2, rest2, correction, eps, rate, decay = scalars
    m, v = states
    m = m * beta1 + grad * rest1
    v = v * beta2 + (grad * grad) * rest2
    root = tl.sqrt_rn(v) * correction + eps
    change = tl.div_rn(m, root) * rate
    return weight * decay - change, (m, v)
