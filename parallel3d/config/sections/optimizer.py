"""The configuration's section `optimizer`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from parallel3d.config.sections.base import Fraction, Section
from parallel3d.config.specs.update_rules import DEFAULT_UPDATE_RULE, UPDATE_RULES, UpdateRuleName, default_settings


class OptimizerConfig(Section):
    """The update rule and its settings."""

    kind: UpdateRuleName = DEFAULT_UPDATE_RULE
    """The update rule. Settings that it does not have are null; others are its defaults where they are not given."""
    backend: Literal["torch", "apex", "auto"] = "torch"
    """What runs the update: torch's fused kernel, or NVIDIA apex's FusedAdam (AdamW on CUDA; precision.policy fp32,
    fp16 or bf16; never run yet). auto: apex where it is installed and fits."""
    learning_rate: PositiveFloat
    """Peak learning rate; `lr_schedule` says how it is reached and left."""
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
    """Apply the weight decay to norm weights and biases too (HLAT's runs did)."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm. Null: no clipping."""

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
