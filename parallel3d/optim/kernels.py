"""Fused kernels for AdamW: torch's, and NVIDIA apex's FusedAdam. The latter has never been run on apex itself.

FusedAdam in adam_w_mode: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w). torch shrinks w first: w (1 - lr
weight_decay) - ...: the same but for rounding, 7e-6 of fp32 weights near 0 after some steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from parallel3d.backends import Backend, choose_backend, find_symbol
from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.optim.update_rules import find_rule
from parallel3d.optim.update_rules.adamw import AdamW
from parallel3d.optim.update_rules.update_rule import UpdateStep

Kernel = Callable[..., None]
"""kernel(rule, weights, states, grads, step, *, weight_decay): updates `weights` (n,) and `states` (num_states, n) in
place with `grads` (n,), all of one format, fp32 or wider; `grads` are already multiplied by the step's `grad_scale`."""

APEX_ADAM = ("apex.optimizers", "FusedAdam")


def choose_update_backend(optimizer: OptimizerConfig, state: torch.dtype, device_type: str) -> Backend:
    """What runs the updates of states in the format `state`; ConfigError where it can't be had."""
    asked = optimizer.backend
    if asked == "auto" and (state != torch.float32 or "apex" not in find_rule(optimizer.kind).backends):
        asked = "torch"
    module, name = APEX_ADAM
    return choose_backend("optimizer.backend", asked, module=module, name=name, device_type=device_type)


def adamw_torch(
    rule: AdamW, weights: Tensor, states: Tensor, grads: Tensor, step: UpdateStep, *, weight_decay: float
) -> None:
    """A `Kernel`: torch's fused one."""
    adamw(
        [weights],
        [grads],
        [states[0]],
        [states[1]],
        [],
        [torch.full((), float(step.number - 1), device=weights.device)],
        fused=True,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=step.learning_rate,
        weight_decay=weight_decay,
        eps=rule.eps,
        maximize=False,
    )


def adamw_apex(
    rule: AdamW, weights: Tensor, states: Tensor, grads: Tensor, step: UpdateStep, *, weight_decay: float
) -> None:
    """A `Kernel`: apex's, for fp32 on a CUDA device.

    The state is ours: each update lends it to a temporary optimizer, which costs some microseconds.
    """
    fused_adam: Any = find_symbol(*APEX_ADAM)
    assert fused_adam is not None, "chosen without apex"
    settings = dict(lr=step.learning_rate, betas=(rule.beta1, rule.beta2), eps=rule.eps, weight_decay=weight_decay)
    with torch.cuda.device_of(weights):  # it puts a flag on the current device
        optimizer = fused_adam([weights], adam_w_mode=True, **settings)
        optimizer.state[weights] = {"exp_avg": states[0], "exp_avg_sq": states[1]}
        optimizer.param_groups[0]["step"] = step.number - 1
        weights.grad = grads
        optimizer.step()
        weights.grad = None


KERNELS: dict[tuple[str, Backend], Kernel] = {
    (AdamW.name, "torch"): adamw_torch,
    (AdamW.name, "apex"): adamw_apex,
}
"""By update rule and backend. A rule without one runs its formula block by block."""
