"""Gradients of weights by AMX, straight into main gradients in fp32, by a loop in C (weight_grad_loops.c).

torch's product on CPUs has no other format than its factors', so a gradient is rounded to 16 bits before it is added;
and oneDNN copies a transposed factor slowly: with AMX these products reach half of the speed of the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.kernels.c_loops import has_tiles, run_weight_grad_loop

_SIDE = 32
"""Columns of weight_grad_loops.c at a time."""
_CHUNK_BYTES = 1 << 19
"""Of x at a time, which second-level caches hold; tried: 256 KiB to 4 MiB."""


def add_weight_grad(total: Tensor, grad: Tensor, x: Tensor, *, overwrite: bool) -> bool:
    """total (out, in) += grad^T x, or = with `overwrite`, for grad (tokens, out) and x (tokens, in) in bf16 and a total
    in fp32. False: nothing was done, since the format or the machine doesn't fit."""
    num_tokens, num_out = grad.shape
    num_in = x.shape[1]
    fits = grad.dtype is x.dtype is torch.bfloat16 and total.dtype is torch.float32 and total.is_contiguous()
    if not (fits and num_tokens > 0 and grad.device.type == "cpu" and has_tiles()):
        return False
    grad, x = (each if each.stride(1) == 1 else each.contiguous() for each in (grad, x))
    chunk = min(_CHUNK_BYTES // (2 * num_in), num_tokens)
    chunk = -(-max(chunk, 1) // _SIDE) * _SIDE
    num_panels = -(-num_in // _SIDE) + torch.get_num_threads()
    space = torch.empty(chunk // 2 * _SIDE * num_panels, dtype=torch.float32)
    factors = (grad.data_ptr(), grad.stride(0), x.data_ptr(), x.stride(0))
    run_weight_grad_loop("add_weight_grad", total, *factors, space, chunk, num_tokens, num_out, num_in, int(overwrite))
    return True
