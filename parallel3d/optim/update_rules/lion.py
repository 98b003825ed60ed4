"""Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2): the sign of a momentum.

Each step moves an element by the whole learning rate. So this is 3 to 10 times smaller than AdamW's, and the weight
decay as much larger (section 5).
"""

from __future__ import annotations

from parallel3d.config.sections.section import Fraction
from parallel3d.optim.update_rules.update_rule import EXP_AVG, Block, UpdateRule, UpdateStep


class Lion(UpdateRule):
    """Step: sign(beta1 m + (1 - beta1) g); then m = beta2 m + (1 - beta2) g."""

    name = "lion"
    states = (EXP_AVG,)
    has_triton_formula = True
    has_c_formula = True

    beta1: Fraction = 0.9
    """The momentum's share of a step."""
    beta2: Fraction = 0.99
    """Decay of the momentum per update."""

    def scalars(self, step: UpdateStep, *, weight_decay: float) -> tuple[float, ...]:
        decay = 1.0 - step.learning_rate * weight_decay
        return self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2, step.learning_rate, decay

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        beta1, rest1, beta2, rest2, rate, decay = self.scalars(step, weight_decay=weight_decay)
        (momentum,) = block.states
        change = (momentum * beta1).add_(block.grad * rest1).sign_().mul_(rate)
        momentum.mul_(beta2).add_(block.grad.mul_(rest2))
        block.weight.mul_(decay).sub_(change)


RULE = Lion
