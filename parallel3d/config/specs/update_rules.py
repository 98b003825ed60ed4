"""The update rules of `optimizer.kind`: their states and settings, as data. Pure.

A row names what a rule keeps and what it can be set to; `parallel3d/optim/update_rules/<name>.py` holds its arithmetic.
Checkpoints, ZeRO ranges, backups, recovery, rounding noise, monitors and validation follow from the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

EXP_AVG_SQ = "exp_avg_sq"
"""The state that the monitors measure: the running mean of squared gradients."""
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


@dataclass(frozen=True, kw_only=True)
class UpdateRuleSpec:
    """One update rule."""

    name: str
    states: tuple[StateSpec, ...]
    settings: Mapping[str, float] = field(default_factory=dict)
    """Fields of the section `optimizer` that only some rules have, with their defaults."""
    backends: tuple[str, ...] = ("torch",)
    is_matrix_wise: bool = False
    """Whether an element's update depends on its whole matrix. Other parameters are then updated by `fallback`."""
    fallback: str | None = None

    def __post_init__(self) -> None:
        assert len(self.states) <= MAX_STATES, self.name
        assert self.is_matrix_wise == (self.fallback is not None), self.name

    @property
    def state_kinds(self) -> tuple[str, ...]:
        return tuple(state.kind for state in self.states)

    @property
    def row_of_exp_avg_sq(self) -> int | None:
        """Which of the states is the running mean of squared gradients; None: none is."""
        return next((row for row, state in enumerate(self.states) if state.name == EXP_AVG_SQ), None)


_FIRST_MOMENT = StateSpec(name="exp_avg", kind="moment1", title="first moment")
_SECOND_MOMENT = StateSpec(name=EXP_AVG_SQ, kind="moment2", title="second moment")

UPDATE_RULES = {
    spec.name: spec
    for spec in (
        UpdateRuleSpec(
            name="adamw",  # Loshchilov and Hutter 2019
            states=(_FIRST_MOMENT, _SECOND_MOMENT),
            settings={"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
            backends=("torch", "apex"),
        ),
        UpdateRuleSpec(
            name="lion",  # Chen et al. 2023
            states=(_FIRST_MOMENT,),
            settings={"beta1": 0.9, "beta2": 0.99},
        ),
        UpdateRuleSpec(
            name="muon",  # Jordan et al. 2024
            states=(StateSpec(name="momentum", kind="momentum", title="momentum"),),
            settings={"momentum": 0.95, "matrix_learning_rate": 0.02},
            is_matrix_wise=True,
            fallback="adamw",
        ),
    )
}
DEFAULT_UPDATE_RULE = next(iter(UPDATE_RULES))
EXP_AVG_SQ_KIND = _SECOND_MOMENT.kind

if TYPE_CHECKING:
    UpdateRuleName = str
else:
    UpdateRuleName = Literal[tuple(UPDATE_RULES)]


def specs_of(kind: str) -> tuple[UpdateRuleSpec, ...]:
    """The rule `kind`, then the one that updates what it does not."""
    spec = UPDATE_RULES[kind]
    return (spec,) if spec.fallback is None else (spec, UPDATE_RULES[spec.fallback])


def default_settings(kind: str) -> dict[str, float]:
    """The settings of the rule and of its fallback, with their defaults."""
    return {name: value for spec in reversed(specs_of(kind)) for name, value in spec.settings.items()}


def has_exp_avg_sq(kind: str) -> bool:
    """Whether some parameters have a running mean of squared gradients, which decays by `optimizer.beta2`."""
    return any(spec.row_of_exp_avg_sq is not None for spec in specs_of(kind))


ALL_SETTINGS = tuple(dict.fromkeys(name for kind in UPDATE_RULES for name in default_settings(kind)))
