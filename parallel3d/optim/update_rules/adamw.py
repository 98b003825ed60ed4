"""AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2)."""

from __future__ import annotations

from pydantic import PositiveFloat

from parallel3d.config.sections.section import Fraction
from parallel3d.optim.update_rules.update_rule import EXP_AVG, EXP_AVG_SQ, Block, UpdateRule, UpdateStep, take_root


class AdamW(UpdateRule):
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2. Step: m / (1 - beta1^t) over
    sqrt(v / (1 - beta2^t)) + eps. Ranges in fp32 or wider are updated by a fused kernel (`optim/kernels.py`)."""

    name = "adamw"
    is_default = True
    states = (EXP_AVG, EXP_AVG_SQ)
    backends = ("torch", "apex")
    has_triton_formula = True
    has_c_formula = True

    beta1: Fraction = 0.9
    """Decay of the first moment per update."""
    beta2: Fraction = 0.95
    """Decay of the second moment per update."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def scalars(self, step: UpdateStep, *, weight_decay: float) -> tuple[float, ...]:
        rate = step.learning_rate / (1.0 - self.beta1**step.number)
        correction = (1.0 - self.beta2**step.number) ** -0.5
        decay = 1.0 - step.learning_rate * weight_decay
        return self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2, correction, self.eps, rate, decay

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        beta1, rest1, beta2, rest2, correction, eps, rate, decay = self.scalars(step, weight_decay=weight_decay)
        (first, second), grad = block.states, block.grad
        first.mul_(beta1).add_(grad * rest1)
        second.mul_(beta2).add_(grad.square().mul_(rest2))
        root = take_root(grad.copy_(second))
        root.mul_(correction).add_(eps)
        change = first.div(root).mul_(rate)
        block.weight.mul_(decay).sub_(change)


RULE = AdamW
