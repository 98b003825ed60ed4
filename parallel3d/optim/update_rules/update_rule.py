"""The interface of an update rule: its states and settings as data, and its formula on flat ranges of elements.

A rule is a class: class attributes name what it keeps, its fields are its settings (fields of the section `optimizer`),
and `update_block` is the formula, in fp32 or wider, on a block of elements. Checkpoints, ZeRO ranges, backups,
recovery, rounding noise, monitors, validation and the configuration's reference follow from the class; the optimizer
applies it (`optim/updater.py`).

Formulas are written with methods of tensors, so that this package is below the configuration and imports no torch. They
go by single additions, multiplications, divisions and roots (`take_root`), which IEEE 754 defines to the last bit: a
result depends neither on the block's size nor on an element's position nor on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallel3d.config.sections.section import Section

if TYPE_CHECKING:
    from torch import Tensor

MAX_STATES = 3
"""An element has 64 random bits: 16 each for its weight and its states."""


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """One number that a rule keeps for each element, in the policy's state format; it starts at 0."""

    name: str
    kind: str
    """Its name in the keys of a checkpoint."""
    title: str
    """Its name in messages."""


EXP_AVG = StateSpec(name="exp_avg", kind="moment1", title="first moment")
"""The running mean of gradients."""
EXP_AVG_SQ = StateSpec(name="exp_avg_sq", kind="moment2", title="second moment")
"""The running mean of squared gradients, which the monitors measure. A rule that keeps it has a setting `beta2`."""


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """The numbers of one update, the same on every rank."""

    number: int
    """1 for the first."""
    learning_rate: float
    peak_learning_rate: float
    """`optimizer.learning_rate`: a rule with a peak of its own follows the schedule by the ratio of the two."""
    grad_scale: float
    """Multiplies the gradients: clipping, and the mean over tokens."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some elements of a range in fp32 or wider, each tensor (n,). The rule may overwrite all but the direction."""

    weight: Tensor
    states: tuple[Tensor, ...]
    """In the order of the rule's `states`."""
    grad: Tensor
    """Already multiplied by the step's `grad_scale`."""
    direction: Tensor | None
    """From a rule that needs whole matrices; None for others."""


def take_root(values: Tensor) -> Tensor:
    """The square root of each of `values`, in place, rounded as IEEE 754 says.

    torch's own on a CPU is MKL's, which on an AMD is wrong in the last bit of 17 % of all fp32 numbers.
    """
    if values.device.type != "cpu":
        return values.sqrt_()
    from numpy import sqrt

    array = values.numpy()
    sqrt(array, out=array)
    return values


class UpdateRule(Section, ABC):
    """One update rule. Class attributes are its row, fields are its settings with their defaults and docstrings."""

    name: ClassVar[str]
    """As `optimizer.kind` names it."""
    is_default: ClassVar[bool] = False
    states: ClassVar[tuple[StateSpec, ...]]
    backends: ClassVar[tuple[str, ...]] = ("torch",)
    """Values of `optimizer.backend` that it supports; `optim/kernels.py` has the kernels of others than torch."""
    has_triton_formula: ClassVar[bool] = False
    """Whether `triton_<name>.py` beside the rule's file defines its formula for Triton, `update_values`, which gets the
    rule's `scalars`. Without it GPUs run `update_block`."""
    has_c_formula: ClassVar[bool] = False
    """The same for `c_<name>.c` and CPUs."""
    fallback: ClassVar[str | None] = None
    """For a rule on matrices: the rule that updates all other parameters."""

    @classmethod
    def state_kinds(cls) -> tuple[str, ...]:
        """The names of its states in the keys of a checkpoint."""
        return tuple(state.kind for state in cls.states)

    def scalars(self, step: UpdateStep, *, weight_decay: float) -> tuple[float, ...]:
        """The numbers in the formula of one update."""
        raise NotImplementedError

    @abstractmethod
    def update_block(self, block: Block, step: UpdateStep, *, weight_decay: float) -> None:
        """Updates the block's weights and states in place."""


class MatrixRule(UpdateRule):
    """A rule whose step depends on whole matrices: `optim/matrices.py` makes the directions, `update_block` applies
    them. It updates the layers' matrices; `fallback` updates embeddings, the head, norms and biases."""

    @abstractmethod
    def direction(self, grad: Tensor, states: Sequence[Tensor]) -> Tensor:
        """The step's direction (rows, columns) from `grad` and `states`, each (rows, columns), which stay as they are.

        `grad` is already multiplied by the step's `grad_scale`.
        """
