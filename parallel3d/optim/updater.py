"""Applies update rules to flat ranges of weights, states and gradients.

Ranges in fp32 or wider are updated by a fused kernel where the rule has one, else by the rule's formula block by block.
Narrow ranges (bf16) are widened to fp32 block by block, updated there, and each result is rounded, with noise of its
own or to the nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from parallel3d.accelerator import is_accelerator
from parallel3d.backends import Backend
from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.optim.kernels import KERNELS, Kernel
from parallel3d.optim.update_rules import rules_of
from parallel3d.optim.update_rules.update_rule import Block, MatrixRule, UpdateRule, UpdateStep
from parallel3d.precision.stochastic_rounding import Noise, noise_of, round_to_bf16

_BLOCK = 1 << 15
"""Elements: what a block needs stays in a core's cache."""
_DEVICE_BLOCK = 1 << 24
"""On a device, where starting a kernel takes longer than running it on a small block."""


@dataclass(frozen=True, kw_only=True)
class Updater:
    """One update rule, ready to run."""

    rule: UpdateRule
    kernel: Kernel | None = None
    """Updates ranges in fp32 or wider; None: the rule's formula does."""

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
        """Updates `weights` (n,) and `states` (num_states, n), of one format, with `grads` (n,) of any, which are still
        to be multiplied by the step's `grad_scale`."""
        if self.kernel is not None:
            scaled = grads.to(weights.dtype) * step.grad_scale
            self.kernel(self.rule, weights, states, scaled, step, weight_decay=weight_decay)
            return
        for part in _blocks(weights):
            block = Block(
                weight=weights[part],
                states=states[:, part].unbind(),
                grad=grads[part].to(weights.dtype) * step.grad_scale,
                direction=None if directions is None else directions[part],
            )
            self.rule.update_block(block, step, weight_decay=weight_decay)

    def update_bf16(
        self,
        weights: Tensor,
        states: Tensor,
        grads: Tensor,
        step: UpdateStep,
        *,
        weight_decay: float,
        noise: Noise | None,
        directions: Tensor | None = None,
        block_size: int | None = None,
    ) -> None:
        """Updates bf16 `weights` (n,) and `states` (num_states, n) with `grads` (n,) of any format, which are still to
        be multiplied by the step's `grad_scale`.

        The weights are updated with the states as they are before these are rounded. With `noise` results are rounded
        stochastically, the weight by the lowest 16 bits, the states by the next; without to the nearest.
        """
        for part in _blocks(weights, block_size):
            stored = (weights[part], *states[:, part].unbind())
            weight, *wide_states = (each.float() for each in stored)
            block = Block(
                weight=weight,
                states=tuple(wide_states),
                grad=grads[part].float() * step.grad_scale,
                direction=None if directions is None else directions[part],
            )
            self.rule.update_block(block, step, weight_decay=weight_decay)
            words = noise(range(part.start, part.stop)) if noise is not None else None
            for number, (narrow, value) in enumerate(zip(stored, (block.weight, *block.states))):
                narrow.copy_(value if words is None else round_to_bf16(value, noise_of(words, number)))


@dataclass(frozen=True, kw_only=True)
class Updaters:
    """What updates a model: each parameter by the rule for its shape."""

    element: Updater
    """For all parameters but those that `matrix` updates."""
    matrix: Updater | None = None
    """For the matrices of the layers; None: the rule does not need them whole."""
    weight_decay: float
    decay_norms_and_biases: bool

    def of(self, is_matrix_wise: bool) -> Updater:
        """The one for the layers' matrices, or for all other parameters."""
        if not is_matrix_wise:
            return self.element
        assert self.matrix is not None
        return self.matrix

    @staticmethod
    def build(optimizer: OptimizerConfig, backend: Backend = "torch") -> Updaters:
        """Returns the updaters of the rule that the configuration names, with its settings."""
        built = [build_updater(rule, optimizer.settings, backend=backend) for rule in rules_of(optimizer.kind)]
        return Updaters(
            element=built[-1],
            matrix=built[0] if isinstance(built[0].rule, MatrixRule) else None,
            weight_decay=optimizer.weight_decay,
            decay_norms_and_biases=optimizer.decay_norms_and_biases,
        )


def build_updater(rule: type[UpdateRule], settings: dict[str, float], *, backend: Backend = "torch") -> Updater:
    """Returns the updater of `rule` with its own of the `settings`."""
    own = {name: settings[name] for name in rule.model_fields}
    return Updater(rule=rule(**own), kernel=KERNELS.get((rule.name, backend)))


def _blocks(flat: Tensor, size: int | None = None) -> list[slice]:
    """`flat` (n,) in blocks that fit into a core's cache; on a device in large ones, as each launch costs time."""
    size = size or (_DEVICE_BLOCK if is_accelerator(flat.device) else _BLOCK)
    return [slice(start, min(start + size, len(flat))) for start in range(0, len(flat), size)]
