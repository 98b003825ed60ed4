"""AdamW by NVIDIA apex's FusedAdam, on the flat ranges that this project keeps. Never run on apex itself.

FusedAdam in adam_w_mode: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w). torch shrinks w first: w (1 - lr
weight_decay) - ...: the same but for rounding, 7e-6 of fp32 weights near 0 after some steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.backends import find_symbol
from parallel3d.optim.adamw import AdamWSettings, UpdateStep

SYMBOL = ("apex.optimizers", "FusedAdam")


def adamw_apex(
    weights: Tensor, moments: Tensor, grads: Tensor, step: UpdateStep, settings: AdamWSettings, *, weight_decay: float
) -> None:
    """As `adamw.adamw_fused`, for weights and moments in fp32 on a CUDA device.

    The state is ours: each update lends it to an optimizer of its own, which costs some microseconds.
    """
    fused_adam = find_symbol(*SYMBOL)
    assert fused_adam is not None, "chosen without apex"
    with torch.cuda.device_of(weights):  # it puts a flag on the current device
        optimizer = fused_adam(
            [weights],
            lr=step.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            adam_w_mode=True,
            weight_decay=weight_decay,
        )
        optimizer.state[weights] = {"exp_avg": moments[0], "exp_avg_sq": moments[1]}
        optimizer.param_groups[0]["step"] = step.number - 1
        weights.grad = grads.to(weights.dtype) * step.grad_scale
        optimizer.step()
        weights.grad = None
