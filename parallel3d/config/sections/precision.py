"""The configuration's section `precision`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, frexp, log2
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from parallel3d.config.rule import rule
from parallel3d.config.sections.section import Section
from parallel3d.config.specs.policies import DEFAULT_POLICY, POLICY_SPECS, names_of
from parallel3d.errors import Problem

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICY_SPECS)]


class LossScaleConfig(Section):
    """The factor on the gradients of the mean loss that keeps them within fp16's range. All values are powers of
    two."""

    initial: PositiveFloat = 65536.0
    """Scale of the first step; at least min."""
    growth_interval: PositiveInt | None = 2000
    """Consecutive steps without infinity or NaN after which the scale grows. Null: it never grows."""
    growth_factor: PositiveFloat = 2.0
    """Factor by which the scale grows; at least 1."""
    backoff_factor: PositiveFloat = 0.5
    """Factor on the scale after a step with a gradient that is not finite, whose update is skipped; at most 1."""
    min: PositiveFloat = 1.0
    """Lower limit of the scale."""


class PrecisionConfig(Section):
    """Number formats."""

    sums: Literal["float", "exact"] = "float"
    """exact: gradients, losses and squares of micro-batches are added as 64-bit integers, whose sum has the same bits
    in any order, so that neither the layout nor a failure changes the run. Takes 8 more bytes per parameter, and is
    slower."""
    policy: PolicyName = Field(
        default=DEFAULT_POLICY,
        description="; ".join(f"{name}: {spec.description}" for name, spec in POLICY_SPECS.items()) + ".",
    )
    stochastic_rounding: list[Literal["update", "accumulation", "outputs"]] = []
    """What a policy that rounds updates stochastically also rounds this way. accumulation: each micro-batch's gradients
    as they are added; outputs: those of the linear layers in training. Slow: for experiments with what hardware does
    that rounds stochastically everywhere."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """How a policy that scales the loss (fp16) scales gradients; no effect on the others."""


@rule("precision.policy", "precision.stochastic_rounding")
def check_stochastic_rounding(policy: str, what: list[str]) -> Iterator[Problem]:
    """The policy rounds stochastically."""
    fitting = names_of(lambda spec: spec.rounds_stochastically)
    if what and policy not in fitting:
        yield Problem(
            field="precision.stochastic_rounding",
            value=what,
            rule=f"only applies to policy {' or '.join(fitting)}, and precision.policy is {policy}",
            fix=f'Remove it, or set precision.policy to "{fitting[0]}"',
        )


@rule("precision.loss_scale")
def check_loss_scale(scale: LossScaleConfig) -> Iterator[Problem]:
    """Values are powers of two, and on the right side of their limits."""
    for name, value in scale.model_dump(exclude={"growth_interval"}).items():
        if frexp(value)[0] != 0.5:
            low = 2.0 ** floor(log2(value))
            rule_text, fix = "must be a power of two: scaling then changes no bit", f"Use {low:g} or {2 * low:g}"
            yield Problem(field=f"precision.loss_scale.{name}", value=value, rule=rule_text, fix=fix)
    for name, is_kept, rule_text in (
        ("initial", scale.initial >= scale.min, f"must be at least precision.loss_scale.min ({scale.min:g})"),
        ("growth_factor", scale.growth_factor >= 1, "must be at least 1"),
        ("backoff_factor", scale.backoff_factor <= 1, "must be at most 1"),
    ):
        if not is_kept:
            value = getattr(scale, name)
            yield Problem(field=f"precision.loss_scale.{name}", value=value, rule=rule_text, fix="Change it")
