"""What an update rule is: arithmetic on flat ranges of weights, states and gradients.

A rule writes `update_block`, the formula in fp32 or wider on a block of elements. From it follow the update of weights
in those formats and that of weights and states in bf16: a block is widened to fp32, updated there, and each result is
rounded with noise of its own or to the nearest. Formulas go by single adds, multiplications, divisions and roots, which
IEEE 754 defines to the last bit, so that a result depends neither on the block's size nor on an element's position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from torch import Tensor

from parallel3d.backends import Backend
from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.config.specs.update_rules import UPDATE_RULES, UpdateRuleSpec, specs_of
from parallel3d.precision.stochastic_rounding import Noise, noise_of, round_to_bf16

_BLOCK = 1 << 15
"""Elements: what a block needs stays in a core's cache."""
_DEVICE_BLOCK = 1 << 24
"""On a device, where starting a kernel takes longer than running it on a small block."""


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """What an update is made with, the same on every rank: `number` is 1 for the first."""

    number: int
    learning_rate: float
    grad_scale: float


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some elements of a range in fp32 or wider, each tensor (n,); the rule writes over all but the directions."""

    weight: Tensor
    states: tuple[Tensor, ...]
    grad: Tensor
    """Times the step's factor."""
    direction: Tensor | None
    """From a rule that needs whole matrices; None for others."""


class UpdateRule(ABC):
    """One row of UPDATE_RULES with its settings, which a subclass has as attributes."""

    def __init__(self, spec: UpdateRuleSpec, settings: dict[str, float], *, backend: Backend = "torch"):
        self.spec = spec
        self.backend = backend
        self.read_settings(settings)

    @abstractmethod
    def read_settings(self, settings: dict[str, float]) -> None:
        """Takes the rule's own out of `settings`."""

    @abstractmethod
    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        """Updates the block's weights and states in place."""

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
        """Updates `weights` (n,) and `states` (num_states, n), of one format, with `grads` (n,) of any times the step's
        factor."""
        for part in _blocks(weights):
            block = Block(
                weight=weights[part],
                states=states[:, part].unbind(),
                grad=grads[part].to(weights.dtype) * step.grad_scale,
                direction=None if directions is None else directions[part],
            )
            self.update_block(block, step, weight_decay=weight_decay)

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
        """Updates bf16 `weights` (n,) and `states` (num_states, n) with `grads` (n,) of any format times the step's
        factor.

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
            self.update_block(block, step, weight_decay=weight_decay)
            words = noise(range(part.start, part.stop)) if noise is not None else None
            for number, (narrow, value) in enumerate(zip(stored, (block.weight, *block.states))):
                narrow.copy_(value if words is None else round_to_bf16(value, noise_of(words, number)))


class MatrixRule(UpdateRule):
    """A rule whose step depends on whole matrices: matrices.py makes the directions, `update_block` applies them."""

    @abstractmethod
    def direction(self, grad: Tensor, states: Sequence[Tensor]) -> Tensor:
        """The step's direction (rows, columns) from `grad` and `states`, each (rows, columns), which stay as they are.

        `grad` has the step's factor already.
        """


def build_update_rule(name: str, settings: dict[str, float], *, backend: Backend = "torch") -> UpdateRule:
    """The rule of a row: RULE of the module of its name."""
    module = import_module(f"parallel3d.optim.update_rules.{name}")
    rule: UpdateRule = module.RULE(UPDATE_RULES[name], settings, backend=backend)
    return rule


@dataclass(frozen=True, kw_only=True)
class UpdateRules:
    """What updates a model: each parameter by the rule for its shape."""

    element: UpdateRule
    """For all parameters but those that `matrix` has."""
    matrix: MatrixRule | None = None
    """For the matrices of the layers; None: no rule needs them whole."""
    weight_decay: float
    decay_norms_and_biases: bool

    @staticmethod
    def build(optimizer: OptimizerConfig, backend: Backend = "torch") -> UpdateRules:
        settings = optimizer.settings | {"learning_rate": optimizer.learning_rate}
        rules = [build_update_rule(spec.name, settings, backend=backend) for spec in specs_of(optimizer.kind)]
        return UpdateRules(
            element=rules[-1],
            matrix=rules[0] if isinstance(rules[0], MatrixRule) else None,
            weight_decay=optimizer.weight_decay,
            decay_norms_and_biases=optimizer.decay_norms_and_biases,
        )


def _blocks(flat: Tensor, size: int | None = None) -> list[slice]:
    """`flat` (n,) cut into blocks that fit a core's cache; on a device few launches count."""
    size = size or (_BLOCK if flat.device.type == "cpu" else _DEVICE_BLOCK)
    return [slice(start, min(start + size, len(flat))) for start in range(0, len(flat), size)]
