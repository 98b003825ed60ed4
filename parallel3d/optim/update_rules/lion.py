"""Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2): the sign of a momentum.

Each step moves an element by the whole learning rate, so that this is 3 to 10 times smaller than AdamW's, and the
weight decay as much larger (section 5).
"""

from __future__ import annotations

from parallel3d.optim.update_rules.update_rule import Block, UpdateRule, UpdateStep


class Lion(UpdateRule):
    """State: exp_avg, m. Step: sign(beta1 m + (1 - beta1) g); then m = beta2 m + (1 - beta2) g."""

    def read_settings(self, settings: dict[str, float]) -> None:
        self.beta1, self.beta2 = settings["beta1"], settings["beta2"]

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        (momentum,) = block.states
        change = (momentum * self.beta1).add_(block.grad * (1.0 - self.beta1)).sign_().mul_(step.learning_rate)
        momentum.mul_(self.beta2).add_(block.grad.mul_(1.0 - self.beta2))
        block.weight.mul_(1.0 - step.learning_rate * weight_decay).sub_(change)


RULE = Lion
