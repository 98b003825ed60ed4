"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum, orthogonalized matrix by matrix.

A matrix's step is the nearest semi-orthogonal matrix to its Nesterov momentum, all of whose singular values are about
1, found by five Newton-Schulz iterations. As the author recommends, AdamW updates embeddings, norms, biases and the
output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from parallel3d.config.sections.section import Fraction
from parallel3d.optim.update_rules.update_rule import Block, MatrixRule, StateSpec, UpdateStep

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x -> a x + b x^3 + c x^5: steep at 0; singular values end between about 0.7 and 1.2."""
NUM_ITERATIONS = 5


class Muon(MatrixRule):
    """m = momentum m + (1 - momentum) g. Step: momentum m + (1 - momentum) g, orthogonalized, times
    sqrt(max(1, rows / columns))."""

    name = "muon"
    states = (StateSpec(name="momentum", kind="momentum", title="momentum"),)
    fallback = "adamw"

    momentum: Fraction = 0.95
    """Decay of the momentum per update."""
    matrix_learning_rate: PositiveFloat = 0.02
    """Peak learning rate of the layers' matrices; `learning_rate` is that of the other parameters, which adamw updates.
    Both follow `lr_schedule`."""

    def direction(self, grad: Tensor, states: Sequence[Tensor]) -> Tensor:
        momentum = states[0] * self.momentum + grad * (1.0 - self.momentum)
        nesterov = momentum * self.momentum + grad * (1.0 - self.momentum)
        rows, columns = grad.shape
        return orthogonalize(nesterov) * max(1.0, rows / columns) ** 0.5

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        assert block.direction is not None, "a rule on matrices needs directions"
        learning_rate = step.learning_rate * (self.matrix_learning_rate / step.peak_learning_rate)
        block.states[0].mul_(self.momentum).add_(block.grad.mul_(1.0 - self.momentum))
        block.weight.mul_(1.0 - learning_rate * weight_decay).sub_(block.direction * learning_rate)


def orthogonalize(matrix: Tensor) -> Tensor:
    """U V^T of `matrix` (rows, columns) = U S V^T, roughly: singular values between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    x = matrix / (matrix.norm() + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.t().contiguous() if is_tall else x
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t().contiguous() if is_tall else x


RULE = Muon
