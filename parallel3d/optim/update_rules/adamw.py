"""AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2)."""

from __future__ import annotations

from pydantic import PositiveFloat

from parallel3d.config.sections.section import Fraction
from parallel3d.optim.update_rules.update_rule import EXP_AVG, EXP_AVG_SQ, Block, UpdateRule, UpdateStep


class AdamW(UpdateRule):
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2. Step: m / (1 - beta1^t) over
    sqrt(v / (1 - beta2^t)) + eps. Ranges in fp32 or wider are updated by a fused kernel (`optim/kernels.py`)."""

    name = "adamw"
    is_default = True
    states = (EXP_AVG, EXP_AVG_SQ)
    backends = ("torch", "apex")

    beta1: Fraction = 0.9
    """Decay of the first moment per update."""
    beta2: Fraction = 0.95
    """Decay of the second moment per update."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        (first, second), grad = block.states, block.grad
        first.mul_(self.beta1).add_(grad * (1.0 - self.beta1))
        second.mul_(self.beta2).add_(grad.square().mul_(1.0 - self.beta2))
        root = grad.copy_(second).sqrt_()
        root.mul_((1.0 - self.beta2**step.number) ** -0.5).add_(self.eps)
        change = first.div(root).mul_(step.learning_rate / (1.0 - self.beta1**step.number))
        block.weight.mul_(1.0 - step.learning_rate * weight_decay).sub_(change)


RULE = AdamW
