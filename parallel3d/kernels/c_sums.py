"""Adds bf16 products to fp32 sums by a loop in C: the same bits as torch's, in half of the time."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.kernels.c_loops import has_c_loops, run_layer_loop


def add_product(total: Tensor, product: Tensor) -> None:
    """total += product, in total's format."""
    is_wide_sum = total.dtype is torch.float32 and product.dtype is torch.bfloat16
    has_loop = is_wide_sum and total.device.type == "cpu" and total.is_contiguous() and product.is_contiguous()
    if has_loop and has_c_loops():
        run_layer_loop("add_narrow", total, product, total.numel())
    else:
        total.add_(product)
