"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum, made orthogonal matrix by matrix.

A matrix's step is the nearest semi-orthogonal matrix to its Nesterov momentum, all of whose singular values are about
1, found by five Newton-Schulz iterations. Embeddings, norms, biases and the output head are AdamW's, as the author
says. The learning rate of matrices has a peak of its own and the form of the run's schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel3d.optim.update_rules.update_rule import Block, MatrixRule, UpdateStep

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x -> a x + b x^3 + c x^5: steep at 0; singular values end between about 0.7 and 1.2."""
NUM_ITERATIONS = 5


class Muon(MatrixRule):
    """State: momentum, m = momentum m + (1 - momentum) g."""

    def read_settings(self, settings: dict[str, float]) -> None:
        self.momentum = settings["momentum"]
        self.lr_ratio = settings["matrix_learning_rate"] / settings["learning_rate"]

    def direction(self, grad: Tensor, states: Sequence[Tensor]) -> Tensor:
        momentum = states[0] * self.momentum + grad * (1.0 - self.momentum)
        nesterov = momentum * self.momentum + grad * (1.0 - self.momentum)
        rows, columns = grad.shape
        return orthogonalize(nesterov) * max(1.0, rows / columns) ** 0.5

    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        assert block.direction is not None, "a matrix-wise rule needs directions"
        learning_rate = step.learning_rate * self.lr_ratio
        block.states[0].mul_(self.momentum).add_(block.grad.mul_(1.0 - self.momentum))
        block.weight.mul_(1.0 - learning_rate * weight_decay).sub_(block.direction * learning_rate)


RULE = Muon


def orthogonalize(matrix: Tensor) -> Tensor:
    """U V^T of `matrix` (rows, columns) = U S V^T, roughly: singular values between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    x = matrix / (torch.linalg.vector_norm(matrix) + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.t().contiguous() if is_tall else x
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t().contiguous() if is_tall else x
