"""AdamW (Loshchilov and Hutter 2019, algorithm 2): torch's fused kernel, apex's, or the formula on blocks in fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from parallel3d.optim.update_rules.apex import adamw_apex
from parallel3d.optim.update_rules.update_rule import Block, UpdateRule, UpdateStep


class AdamW(UpdateRule):
    """States: exp_avg, m = beta1 m + (1 - beta1) g; exp_avg_sq, v = beta2 v + (1 - beta2) g^2."""

    def read_settings(self, settings: dict[str, float]) -> None:
        self.beta1, self.beta2, self.eps = (settings[name] for name in ("beta1", "beta2", "eps"))

    def update(
        self,
        weights: Tensor,
        states: Tensor,
        grads: Tensor,
        step: UpdateStep,
        *,
        weight_decay: float,
        directions: Tensor | None = None,
    ) -> None:
        grads = grads.to(weights.dtype) * step.grad_scale
        if self.backend == "apex":
            betas = (self.beta1, self.beta2)
            adamw_apex(weights, states, grads, step, betas=betas, eps=self.eps, weight_decay=weight_decay)
            return
        adamw(
            [weights],
            [grads],
            [states[0]],
            [states[1]],
            [],
            [torch.full((), float(step.number - 1), device=weights.device)],
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=step.learning_rate,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        (first, second), grad = block.states, block.grad
        first.mul_(self.beta1).add_(grad * (1.0 - self.beta1))
        second.mul_(self.beta2).add_(grad.mul_(grad).mul_(1.0 - self.beta2))
        root = torch.sqrt(second, out=grad)
        root.mul_((1.0 - self.beta2**step.number) ** -0.5).add_(self.eps)
        change = torch.div(first, root, out=grad).mul_(step.learning_rate / (1.0 - self.beta1**step.number))
        block.weight.mul_(1.0 - step.learning_rate * weight_decay).sub_(change)


RULE = AdamW
