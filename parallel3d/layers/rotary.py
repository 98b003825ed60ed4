"""Rotary position embedding (Su et al., RoFormer) of a fused projection (`kernels/torch_rotary.py` defines it).

One table serves all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel3d.kernels.layer_kernels import RotaryKernels
from parallel3d.kernels.torch_rotary import HeadLayout


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of position x frequency: (max positions, head size / 2) each."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def build(num_positions: int, head_size: int, theta: float, dtype: torch.dtype, device: str = "cpu") -> RotaryTable:
        inverse = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), inverse)
        return RotaryTable(angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device))


class _SplitRotate(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, table: RotaryTable, heads: HeadLayout, kernels: RotaryKernels, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = table.cos[: qkv.shape[1]], table.sin[: qkv.shape[1]]
        ctx.heads, ctx.kernels, ctx.cos, ctx.sin = heads, kernels, cos, sin
        # detached: the results are values of their own for autograd, wherever they lie
        return kernels.forward(qkv.detach(), cos, sin, heads, may_overwrite=may_overwrite)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.kernels.backward(dq, dk, dv, ctx.cos, ctx.sin, ctx.heads), None, None, None, None


def split_and_rotate(
    qkv: Tensor, table: RotaryTable, heads: HeadLayout, *, kernels: RotaryKernels, may_overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv (batch, seq, q + k + v) -> rotated q (batch, seq, query heads, size), rotated k and v (.., kv heads, size).

    They may lie in qkv's memory, if that `may_overwrite`.
    """
    return _SplitRotate.apply(qkv, table, heads, kernels, may_overwrite)
