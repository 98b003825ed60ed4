"""AdEMAMix (Pagliardini et al. 2024, "The AdEMAMix optimizer: better, faster, older", algorithm 1): AdamW with a
second, slower running mean of gradients. Without the paper's optional warmup of alpha and beta3."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from parallel3d.config.sections.section import Fraction
from parallel3d.optim.update_rules.update_rule import EXP_AVG, EXP_AVG_SQ, Block, StateSpec, UpdateRule, UpdateStep


class AdEMAMix(UpdateRule):
    """Step: (m1 / (1 - beta1^t) + alpha m2) / (sqrt(v / (1 - beta2^t)) + eps)."""

    name = "ademamix"
    states = (EXP_AVG, EXP_AVG_SQ, StateSpec(name="slow_exp_avg", kind="slow_moment", title="slow first moment"))

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

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        (fast, second, slow), grad = block.states, block.grad
        fast.mul_(self.beta1).add_(grad * (1.0 - self.beta1))
        slow.mul_(self.beta3).add_(grad * (1.0 - self.beta3))
        second.mul_(self.beta2).add_(grad.square().mul_(1.0 - self.beta2))
        root = (second / (1.0 - self.beta2**step.number)).sqrt_().add_(self.eps)
        change = (fast / (1.0 - self.beta1**step.number)).add_(slow * self.alpha).div_(root)
        block.weight.mul_(1.0 - step.learning_rate * weight_decay).sub_(change.mul_(step.learning_rate))


RULE = AdEMAMix
