"""The configuration's section `optimizer`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError, create_model, model_validator

from parallel3d.config.named import check_named, schema_of_names
from parallel3d.config.rule import rule
from parallel3d.config.sections.section import Section
from parallel3d.config.specs.policies import names_of
from parallel3d.errors import ConfigError, Problem
from parallel3d.optim.update_rules import (
    ALL_SETTINGS,
    DEFAULT_UPDATE_RULE,
    UPDATE_RULES,
    default_settings,
    find_rule,
    has_exp_avg_sq,
    rules_of,
)

APEX_POLICIES = names_of(lambda policy: policy.fits_apex)
"""Precision policies with the fp32 weights that apex updates."""

UpdateRuleName = Annotated[str, check_named(UPDATE_RULES, find_rule), schema_of_names(UPDATE_RULES)]
"""A name in UPDATE_RULES, or "package:object"."""


class CommonOptimizerConfig(Section):
    """The update rule and its settings."""

    kind: UpdateRuleName = DEFAULT_UPDATE_RULE
    """The update rule. Its settings have its defaults; settings of other rules are null. Or one of your own as
    "package:object" (docs/extending.md), whose settings are in rule_settings."""
    rule_settings: dict[str, Any] = {}
    """Settings of a rule of your own, {"alpha": 4.0}; others have its defaults."""
    backend: Literal["torch", "apex", "auto"] = "torch"
    """Implementation of the update: torch's fused kernel, or NVIDIA apex's FusedAdam (AdamW on CUDA; precision.policy
    fp32, fp16 or bf16; not run yet). auto: apex if it is installed and supports the rule and the policy."""
    learning_rate: PositiveFloat
    """Peak learning rate. lr_schedule sets how it rises and decays."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_norms_and_biases: bool = False
    """Apply weight decay to norm weights and biases too (HLAT's runs did)."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global norm to which larger gradients are scaled down. Null: no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, raw: Any) -> Any:
        kind = raw.get("kind", DEFAULT_UPDATE_RULE) if isinstance(raw, dict) else None
        if not isinstance(kind, str):
            return raw
        try:
            defaults = default_settings(kind)
        except ConfigError:  # the field's own check reports it
            return raw
        if kind in UPDATE_RULES:
            return raw | {name: value for name, value in defaults.items() if raw.get(name) is None}
        given = raw.get("rule_settings", {})
        return raw | {"rule_settings": defaults | given} if isinstance(given, dict) else raw

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the rule, and of the one that it falls back to."""
        if self.kind not in UPDATE_RULES:
            return self.rule_settings
        return {name: getattr(self, name) for name in default_settings(self.kind)}

    @property
    def exp_avg_sq_decay(self) -> float | None:
        """`beta2` where the rule keeps a running mean of squared gradients; None where it does not."""
        return self.settings["beta2"] if has_exp_avg_sq(self.kind) else None


def _setting_field(name: str) -> Any:
    """Type and field of a setting in the section: null by default, described by every rule that has it."""
    owners = {rule: rule.model_fields[name] for rule in UPDATE_RULES.values() if name in rule.model_fields}
    kinds = {Annotated[(field.annotation, *field.metadata)] for field in owners.values()}
    assert len(kinds) == 1, f"update rules differ in the type of {name}"
    lines = [f"{rule.name} ({field.default:g} by default): {field.description}" for rule, field in owners.items()]
    return kinds.pop() | None, Field(default=None, description="\n".join(lines))


if TYPE_CHECKING:
    OptimizerConfig = CommonOptimizerConfig
else:
    OptimizerConfig = create_model(
        "OptimizerConfig",
        __base__=CommonOptimizerConfig,
        __doc__=CommonOptimizerConfig.__doc__,
        __module__=__name__,
        **{name: _setting_field(name) for name in ALL_SETTINGS},
    )
    """The section `optimizer`: the fields that all update rules share, then the rules' own settings."""


@rule("optimizer: kind backend", "precision.policy")
def check_backend(optimizer: OptimizerConfig, policy: str) -> Iterator[Problem]:
    """apex's kernel is one rule's, and updates fp32 weights."""
    if optimizer.backend != "apex":
        return
    if policy not in APEX_POLICIES:
        yield Problem(
            field="optimizer.backend",
            value="apex",
            rule=f"updates fp32 weights, which precision.policy {policy} doesn't have",
            fix=f"Use torch or auto, or one of the policies {', '.join(APEX_POLICIES)}",
        )
    if "apex" not in find_rule(optimizer.kind).backends:
        rule_text = f"has no kernel for optimizer.kind {optimizer.kind}"
        yield Problem(field="optimizer.backend", value="apex", rule=rule_text, fix="Use torch or auto")


@rule("optimizer: kind rule_settings")
def check_rule_settings(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """The settings of a rule of the user's are those that it has."""
    given, is_own = optimizer.rule_settings, optimizer.kind not in UPDATE_RULES
    known = default_settings(optimizer.kind) if is_own else {}
    for name in given.keys() - known.keys():
        rule_text = f"is not a setting of optimizer.kind {optimizer.kind}"
        fix = f"Remove it; it has {', '.join(known) or 'none'}" if is_own else "Set it in optimizer itself"
        yield Problem(field=f"optimizer.rule_settings.{name}", value=given[name], rule=rule_text, fix=fix)
    for each in rules_of(optimizer.kind) if is_own else ():
        try:
            each.model_validate({name: given[name] for name in each.model_fields})
        except ValidationError as error:
            for mistake in error.errors():
                name = str(mistake["loc"][0])
                rule_text, meaning = mistake["msg"].removeprefix("Input "), each.model_fields[name].description or name
                field = f"optimizer.rule_settings.{name}"
                yield Problem(field=field, value=mistake["input"], rule=rule_text, fix=f"It is: {meaning}")


@rule(f"optimizer: kind {' '.join(ALL_SETTINGS)}")
def check_settings(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """No setting is given that the update rule would ignore."""
    is_own = optimizer.kind not in UPDATE_RULES
    known = {} if is_own else default_settings(optimizer.kind)
    for name in ALL_SETTINGS:
        value = getattr(optimizer, name)
        if name not in known and value is not None:
            rule_text = f"is not a setting of optimizer.kind {optimizer.kind}"
            fix = f"Remove it; {optimizer.kind} has {', '.join(known) or 'none'}"
            if is_own:
                fix = f"Set optimizer.rule_settings.{name} for a rule of your own"
            yield Problem(field=f"optimizer.{name}", value=value, rule=rule_text, fix=fix)
