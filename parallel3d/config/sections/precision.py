"""The configuration's section `precision`, and its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from parallel3d.config.sections.base import Section
from parallel3d.config.specs.policies import DEFAULT_POLICY, POLICY_SPECS

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICY_SPECS)]


class LossScaleConfig(Section):
    """The factor on the gradients of the mean loss that keeps them within fp16's range; all are powers of two."""

    initial: PositiveFloat = 65536.0
    """Scale of the first step; at least min."""
    growth_interval: PositiveInt | None = 2000
    """Steps in a row without infinity or NaN after which the scale grows. Null: the scale stays as it is."""
    growth_factor: PositiveFloat = 2.0
    """Times the scale when it grows; at least 1."""
    backoff_factor: PositiveFloat = 0.5
    """Times the scale when a gradient was not finite, which also skips that step's update; at most 1."""
    min: PositiveFloat = 1.0
    """The scale never becomes smaller."""


class PrecisionConfig(Section):
    """Number formats."""

    sums: Literal["float", "exact"] = "float"
    """exact: gradients, losses and squares of micro-batches are added as 64-bit integers, in any order with the same
    bits, so that neither the layout nor a failure changes the run. 8 bytes a parameter more, and slower."""
    policy: PolicyName = Field(
        default=DEFAULT_POLICY,
        description="; ".join(f"{name}: {spec.description}" for name, spec in POLICY_SPECS.items()) + ".",
    )
    stochastic_rounding: list[Literal["update", "accumulation", "outputs"]] = []
    """What a policy that rounds updates stochastically rounds so as well: accumulation, each micro-batch's gradients as
    they are added; outputs, those of the linear layers in training. Slow: to try out hardware that rounds so
    everywhere."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """How a policy that scales the loss (fp16) scales gradients; without effect on the others."""
