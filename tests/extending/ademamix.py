"""AdEMAMix (Pagliardini et al. 2024, "The AdEMAMix optimizer: better, faster, older", algorithm 1): AdamW with a
second, slower running mean of gradients. Without the paper's optional warmup of alpha and beta3."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from parallel3d.config.sections.section import Fraction
from parallel3d.optim.update_rules.update_rule import (
    EXP_AVG,
    EXP_AVG_SQ,
    Block,
    StateSpec,
    UpdateRule,
    UpdateStep,
    take_root,
)


class AdEMAMix(UpdateRule):
    """Step: (m1 / (1 - beta1^t) + alpha m2) / (sqrt(v / (1 - beta2^t)) + eps)."""

    name = "ademamix"
    states = (EXP_AVG, EXP_AVG_SQ, StateSpec(name="slow_exp_avg", kind="slow_moment", title="slow first moment"))
    has_triton_formula = True

    beta1: Fraction = 0.9
    """Decay of the fast running mean per update."""
    beta2: Fraction = 0.999
    """Decay of the second moment per update."""
    beta3: Fraction = 0.9999
    """Decay of the slow running mean per update."""
    alpha: NonNegativeFloat = 5.0
    """Weight of the slow running mean in a step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def scalars(self, step: UpdateStep, *, weight_decay: float) -> tuple[float, ...]:
        corrections = 1.0 / (1.0 - self.beta1**step.number), (1.0 - self.beta2**step.number) ** -0.5
        decay = 1.0 - step.learning_rate * weight_decay
        means = (number for beta in (self.beta1, self.beta2, self.beta3) for number in (beta, 1.0 - beta))
        return *means, *corrections, self.alpha, self.eps, step.learning_rate, decay

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        (fast, second, slow), grad = block.states, block.grad
        beta1, rest1, beta2, rest2, beta3, rest3, *others = self.scalars(step, weight_decay=weight_decay)
        correction1, correction2, alpha, eps, rate, decay = others
        fast.mul_(beta1).add_(grad * rest1)
        slow.mul_(beta3).add_(grad * rest3)
        second.mul_(beta2).add_(grad.square().mul_(rest2))
        root = take_root(second.clone()).mul_(correction2).add_(eps)
        change = (fast * correction1).add_(slow * alpha).div_(root)
        block.weight.mul_(decay).sub_(change.mul_(rate))


RULE = AdEMAMix
