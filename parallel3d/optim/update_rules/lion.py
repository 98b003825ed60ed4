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

    beta1: Fraction = 0.9
    """The momentum's share of a step."""
    beta2: Fraction = 0.99
    """Decay of the momentum per update."""

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        (momentum,) = block.states
        change = (momentum * self.beta1).add_(block.grad * (1.0 - self.beta1)).sign_().mul_(step.learning_rate)
        momentum.mul_(self.beta2).add_(block.grad.mul_(1.0 - self.beta2))
        block.weight.mul_(1.0 - step.learning_rate * weight_decay).sub_(change)


RULE = Lion
