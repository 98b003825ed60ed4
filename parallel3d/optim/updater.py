"""Applies update rules to flat ranges of weights, states and gradients.

On a GPU one kernel, and on a CPU one loop in C, updates a range where the rule has a formula for it
(`kernels/triton_update.py`, `kernels/c_update.py`). Else ranges in fp32 or wider are updated by a fused kernel where
the rule has one, or by the rule's formula block by block. Narrow ranges (bf16) are widened to fp32 block by block,
updated there, and each result is rounded, with noise of its own or to the nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from inspect import getfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.accelerator import blocks_of
from parallel3d.backends import Backend
from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.kernels.choice import KernelForm
from parallel3d.kernels.range_kernels import TORCH_RANGE_KERNELS, RangeKernels
from parallel3d.optim.kernels import KERNELS, Kernel
from parallel3d.optim.update_rules import rules_of
from parallel3d.optim.update_rules.update_rule import Block, MatrixRule, UpdateRule, UpdateStep
from parallel3d.precision.stochastic_rounding import Noise, round_by_words

_BLOCK = 1 << 17
"""Elements. Smaller ones would stay in a core's own cache, but each costs 30 calls of operators."""


@dataclass(frozen=True, kw_only=True)
class Updater:
    """One update rule, ready to run."""

    rule: UpdateRule
    kernel: Kernel | None = None
    """Updates ranges in fp32 or wider; None: the rule's formula does."""
    range_formula: Any | None = None
    """The rule's formula for what updates a whole range, a function in Triton or a file in C; None: `update` does."""

    def update(
        self,
        weights: Tensor,
        states: Tensor,
        grads: Tensor,
        step: UpdateStep,
        *,
        weight_decay: float,
        noise: Noise | None = None,
        directions: Tensor | None = None,
        block_size: int = _BLOCK,
    ) -> None:
        """Updates `weights` (n,) and `states` (num_states, n), of one format, with `grads` (n,) of any, which are still
        to be multiplied by the step's `grad_scale`.

        bf16 weights are updated with the states as they are before these are rounded. With `noise` results are rounded
        stochastically, the weight by the lowest 16 bits, the states by the next; without to the nearest.
        """
        wide = torch.promote_types(weights.dtype, torch.float32)
        is_narrow = weights.dtype != wide
        if self.kernel is not None and not is_narrow:
            scaled = grads.to(wide) * step.grad_scale
            self.kernel(self.rule, weights, states, scaled, step, weight_decay=weight_decay)
            return
        for span in blocks_of(weights, block_size):
            part = slice(span.start, span.stop)
            stored = values = (weights[part], *states[:, part].unbind())
            if is_narrow:
                values = tuple(each.to(wide) for each in stored)  # else updated in place
            block = Block(
                weight=values[0],
                states=values[1:],
                grad=grads[part].to(wide) * step.grad_scale,
                direction=None if directions is None else directions[part],
            )
            self.rule.update_block(block, step, weight_decay=weight_decay)
            if is_narrow:
                _round(stored, values, None if noise is None else noise(span))


def _round(stored: tuple[Tensor, ...], values: tuple[Tensor, ...], words: Tensor | None) -> None:
    """Writes `values`, each (n,) float32, to `stored` bf16: rounded by the random `words`, or to the nearest."""
    for number, (narrow, value) in enumerate(zip(stored, values)):
        if words is None:
            narrow.copy_(value)
        else:
            round_by_words(value, words, number, out=narrow)


@dataclass(frozen=True, kw_only=True)
class Updaters:
    """What updates a model: each parameter by the rule for its shape."""

    element: Updater
    """For all parameters but those that `matrix` updates."""
    matrix: Updater | None = None
    """For the matrices of the layers; None: the rule does not need them whole."""
    weight_decay: float
    decay_norms_and_biases: bool
    kernels: RangeKernels = TORCH_RANGE_KERNELS

    def of(self, is_matrix_wise: bool) -> Updater:
        """The one for the layers' matrices, or for all other parameters."""
        if not is_matrix_wise:
            return self.element
        assert self.matrix is not None
        return self.matrix

    @staticmethod
    def build(
        optimizer: OptimizerConfig, backend: Backend = "torch", kernels: RangeKernels = TORCH_RANGE_KERNELS
    ) -> Updaters:
        """Returns the updaters of the rule that the configuration names, with its settings, in the kernels' form."""
        kinds, settings = rules_of(optimizer.kind), optimizer.settings
        built = [build_updater(rule, settings, backend=backend, form=kernels.form) for rule in kinds]
        return Updaters(
            element=built[-1],
            matrix=built[0] if isinstance(built[0].rule, MatrixRule) else None,
            weight_decay=optimizer.weight_decay,
            decay_norms_and_biases=optimizer.decay_norms_and_biases,
            kernels=kernels,
        )


def build_updater(
    rule: type[UpdateRule], settings: dict[str, Any], *, backend: Backend = "torch", form: KernelForm = "torch"
) -> Updater:
    """Returns the updater of `rule` with its own of the `settings`."""
    own = {name: settings[name] for name in rule.model_fields}
    formula: Any | None = None
    if backend == "torch" and form == "triton" and rule.has_triton_formula:
        package = rule.__module__.rpartition(".")[0]
        formula = import_module(f"{package}.triton_{rule.name}".removeprefix(".")).update_values
    elif backend == "torch" and form == "c" and rule.has_c_formula:
        formula = Path(getfile(rule)).with_name(f"c_{rule.name}.c")
    return Updater(rule=rule(**own), kernel=KERNELS.get((rule.name, backend)), range_formula=formula)
