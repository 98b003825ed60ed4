"""AdamW by NVIDIA apex's FusedAdam, on the flat ranges that this project keeps. Never run on apex itself.

FusedAdam in adam_w_mode: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w). torch shrinks w first: w (1 - lr
weight_decay) - ...: the same but for rounding, 7e-6 of fp32 weights near 0 after some steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.backends import Backend, choose_backend, find_symbol
from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.config.specs.update_rules import UPDATE_RULES
from parallel3d.optim.update_rules.update_rule import UpdateStep

SYMBOL = ("apex.optimizers", "FusedAdam")


def choose_update_backend(optimizer: OptimizerConfig, state: torch.dtype, device_type: str) -> Backend:
    """What runs the updates of states in the format `state`; ConfigError where it can't be had."""
    asked = optimizer.backend
    if asked == "auto" and (state != torch.float32 or "apex" not in UPDATE_RULES[optimizer.kind].backends):
        asked = "torch"
    module, name = SYMBOL
    return choose_backend("optimizer.backend", asked, module=module, name=name, device_type=device_type)


def adamw_apex(
    weights: Tensor,
    states: Tensor,
    grads: Tensor,
    step: UpdateStep,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Updates `weights` (n,) and both moments `states` (2, n) with `grads` (n,), all fp32 on a CUDA device.

    The state is ours: each update lends it to an optimizer of its own, which costs some microseconds.
    """
    fused_adam = find_symbol(*SYMBOL)
    assert fused_adam is not None, "chosen without apex"
    with torch.cuda.device_of(weights):  # it puts a flag on the current device
        optimizer = fused_adam(
            [weights], lr=step.learning_rate, betas=betas, eps=eps, adam_w_mode=True, weight_decay=weight_decay
        )
        optimizer.state[weights] = {"exp_avg": states[0], "exp_avg_sq": states[1]}
        optimizer.param_groups[0]["step"] = step.number - 1
        weights.grad = grads
        optimizer.step()
        weights.grad = None
