"""The configuration's section `optimizer`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from parallel3d.config.rule import rule
from parallel3d.config.sections.section import Fraction, Section
from parallel3d.config.specs.policies import names_of
from parallel3d.config.specs.update_rules import (
    ALL_SETTINGS,
    DEFAULT_UPDATE_RULE,
    UPDATE_RULES,
    UpdateRuleName,
    default_settings,
)
from parallel3d.errors import Problem

APEX_POLICIES = names_of(lambda policy: policy.fits_apex)
"""Precision policies with the fp32 weights that apex updates."""


class OptimizerConfig(Section):
    """The update rule and its settings."""

    kind: UpdateRuleName = DEFAULT_UPDATE_RULE
    """The update rule. Its settings have its defaults; settings of other rules are null."""
    backend: Literal["torch", "apex", "auto"] = "torch"
    """Implementation of the update: torch's fused kernel, or NVIDIA apex's FusedAdam (AdamW on CUDA; precision.policy
    fp32, fp16 or bf16; not run yet). auto: apex if it is installed and supports the rule and the policy."""
    learning_rate: PositiveFloat
    """Peak learning rate. lr_schedule sets how it rises and decays."""
    beta1: Fraction | None = None
    """AdamW: decay of the first moment per update, 0.9 by default. Lion: its momentum's share of a step, 0.9."""
    beta2: Fraction | None = None
    """AdamW: decay of the second moment per update, 0.95 by default. Lion: decay of its momentum, 0.99."""
    eps: PositiveFloat | None = None
    """AdamW: added to the root of the second moment, 1e-8 by default."""
    momentum: Fraction | None = None
    """Muon: decay of the momentum per update, 0.95 by default."""
    matrix_learning_rate: PositiveFloat | None = None
    """Muon: peak learning rate of the matrices that it updates, 0.02 by default; `learning_rate` is that of the other
    parameters, which AdamW updates. Both follow `lr_schedule`."""
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
        if not isinstance(kind, str) or kind not in UPDATE_RULES:
            return raw
        return raw | {name: value for name, value in default_settings(kind).items() if raw.get(name) is None}

    @property
    def settings(self) -> dict[str, float]:
        """The settings of the rule, and of the one that it falls back to."""
        return {name: getattr(self, name) for name in default_settings(self.kind)}


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
    if "apex" not in UPDATE_RULES[optimizer.kind].backends:
        rule_text = f"has no kernel for optimizer.kind {optimizer.kind}"
        yield Problem(field="optimizer.backend", value="apex", rule=rule_text, fix="Use torch or auto")


@rule(f"optimizer: kind {' '.join(ALL_SETTINGS)}")
def check_settings(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """No setting is given that the update rule would ignore."""
    known = default_settings(optimizer.kind)
    for name in ALL_SETTINGS:
        value = getattr(optimizer, name)
        if name not in known and value is not None:
            rule_text = f"is not a setting of optimizer.kind {optimizer.kind}"
            fix = f"Remove it; {optimizer.kind} has {', '.join(known) or 'none'}"
            yield Problem(field=f"optimizer.{name}", value=value, rule=rule_text, fix=fix)
