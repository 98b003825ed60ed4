"""AdEMAMix's formula in Triton: `AdEMAMix.update_block` on fp32 values, operation by operation."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update_values(weight, states, grad, scalars):
    """`scalars` are those of `AdEMAMix.scalars`."""
    beta1, rest1, beta2, rest2, beta3, rest3, correction1, correction2, alpha, eps, rate, decay = scalars
    fast, second, slow = states
    fast = fast * beta1 + grad * rest1
    slow = slow * beta3 + grad * rest3
    second = second * beta2 + (grad * grad) * rest2
    root = tl.sqrt_rn(second) * correction2 + eps
    change = tl.div_rn(fast * correction1 + slow * alpha, root)
    return weight * decay - change * rate, (fast, second, slow)
