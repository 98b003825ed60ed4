"""Rotary position embedding (Su et al., RoFormer) of a fused projection (`kernels/torch_rotary.py` defines it).

One table serves all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel3d.kernels.layer_kernels import RotaryKernels
from parallel3d.kernels.torch_rotary import HeadLayout
from parallel3d.layers.apply_function import apply_function


@dataclass(frozen=True, kw_only=True)
class FrequencyScaling:
    """Rotary frequencies for longer sequences than those of a model's first training.

    Without bounds all are divided by `factor` (Chen et al. 2023, "Extending context window of large language models via
    positional interpolation"). Bounds, as in Llama 3.1: of a wave that turns at most `low` times within
    `original_positions` the frequency is divided, of one that turns `high` times or more it stays, and between them it
    goes over linearly in the number of turns.
    """

    factor: float
    low: float | None = None
    high: float | None = None
    original_positions: int | None = None

    def apply(self, frequencies: Tensor) -> Tensor:
        if self.low is None or self.high is None or self.original_positions is None:
            return frequencies / self.factor
        turns = self.original_positions * frequencies / (2 * pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * kept + frequencies / self.factor * (1 - kept)


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of position x frequency: (max positions, head size / 2) each."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def build(
        num_positions: int,
        head_size: int,
        theta: float,
        dtype: torch.dtype,
        device: str = "cpu",
        scaling: FrequencyScaling | None = None,
    ) -> RotaryTable:
        frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        frequencies = frequencies if scaling is None else scaling.apply(frequencies)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
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
    return apply_function(_SplitRotate, qkv, table, heads, kernels, may_overwrite)
