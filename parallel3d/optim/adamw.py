"""AdamW (Loshchilov and Hutter 2019, algorithm 2) on flat ranges of weights.

Two forms. `adamw_fused` is torch's own kernel, for weights, moments and gradients of one format. `adamw_bf16` is for
weights and moments in bf16: it widens a block to fp32, updates it there and rounds the three results, each with noise
of its own or to the nearest. It goes by single adds, multiplications, divisions and roots, which IEEE 754 defines to
the last bit, so that a result depends neither on the block's size nor on where in it an element stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from parallel3d.backends import Backend
from parallel3d.precision.stochastic_rounding import Noise, noise_of, round_to_bf16

_BLOCK = 1 << 15
"""Elements: what a block needs stays in a core's cache."""
_DEVICE_BLOCK = 1 << 24
"""On a device, where starting a kernel takes longer than running it on a small block."""


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW's constants; the learning rate comes with each update."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    backend: Backend = "torch"
    """What runs the update of weights that are not narrow."""


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """What one update is made with, the same on every rank: `number` is 1 for the first."""

    number: int
    learning_rate: float
    grad_scale: float


def adamw_fused(
    weights: Tensor, moments: Tensor, grads: Tensor, step: UpdateStep, settings: AdamWSettings, *, weight_decay: float
) -> None:
    """Updates `weights` (n,) and `moments` (2, n), of one format, with `grads` (n,) of any times the step's factor."""
    adamw(
        [weights],
        [grads.to(weights.dtype) * step.grad_scale],
        [moments[0]],
        [moments[1]],
        [],
        [torch.full((), float(step.number - 1), device=weights.device)],
        fused=True,
        amsgrad=False,
        beta1=settings.beta1,
        beta2=settings.beta2,
        lr=step.learning_rate,
        weight_decay=weight_decay,
        eps=settings.eps,
        maximize=False,
    )


def adamw_bf16(
    weights: Tensor,
    moments: Tensor,
    grads: Tensor,
    step: UpdateStep,
    settings: AdamWSettings,
    *,
    weight_decay: float,
    noise: Noise | None,
    block: int | None = None,
) -> None:
    """Updates bf16 `weights` (n,) and `moments` (2, n) with `grads` (n,) of any format times the step's factor.

    The weights are updated with the moments as they are before these are rounded. With `noise` results are rounded
    stochastically, the weight by the lowest 16 bits, the moments by the next; without to the nearest.
    """
    size = block or (_BLOCK if weights.device.type == "cpu" else _DEVICE_BLOCK)
    for start in range(0, len(weights), size):
        span = range(start, min(start + size, len(weights)))
        part = slice(span.start, span.stop)
        stored = (weights[part], moments[0, part], moments[1, part])
        weight, first, second = (each.float() for each in stored)
        wide = _updated(weight, first, second, grads[part].float(), step, settings, weight_decay)
        words = noise(span) if noise is not None else None
        for number, (narrow, value) in enumerate(zip(stored, wide)):
            narrow.copy_(value if words is None else round_to_bf16(value, noise_of(words, number)))


def _updated(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    grad: Tensor,
    step: UpdateStep,
    settings: AdamWSettings,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, first and second moment after the step, fp32, written over those that are given."""
    grad = grad * step.grad_scale
    first.mul_(settings.beta1).add_(grad * (1.0 - settings.beta1))
    second.mul_(settings.beta2).add_(grad.mul_(grad).mul_(1.0 - settings.beta2))
    root = torch.sqrt(second, out=grad)
    root.mul_((1.0 - settings.beta2**step.number) ** -0.5).add_(settings.eps)
    change = torch.div(first, root, out=grad).mul_(step.learning_rate / (1.0 - settings.beta1**step.number))
    weight.mul_(1.0 - step.learning_rate * weight_decay).sub_(change)
    return weight, first, second
