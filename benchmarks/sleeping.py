"""A stage that computes nothing and takes its time: for machines that can't compute all stages at once.

The lists, the executor, autograd and the messages around it are real.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.parallel.sharding import ParamSharding

HIDDEN = 8


class SleepingStage(nn.Module):
    """`seconds` in each of three passes: forward, for the gradient of the input, for that of the weight `name`."""

    def __init__(self, name: str, *, is_first: bool, is_last: bool, seconds: float):
        super().__init__()
        self.weight = ShardedParameter(ParamSharding(name=name, shape=(64,)), tp_size=1, dtype=torch.float32)
        self.is_first, self.is_last, self.seconds = is_first, is_last, seconds

    def forward(self, x: Tensor, micro_batch: MicroBatch, targets: Tensor | None = None) -> Tensor:
        if self.is_first:
            x = x.float().unsqueeze(1).expand(-1, HIDDEN).clone().requires_grad_()
        y = _Sleep.apply(x, self.weight, self.seconds)
        return y.sum(dtype=torch.float64) if self.is_last else y


class _Sleep(Function):
    """Takes its time forward, as long for the input's gradient, and hands as much of work to the parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        weight, seconds = ctx.weight, ctx.seconds

        def add() -> None:
            time.sleep(seconds)
            weight.sink.buffer.add_(1.0)
            weight.sink.on_added()

        time.sleep(seconds)
        weight.sink.run_or_defer(add)
        return grad, None, None
