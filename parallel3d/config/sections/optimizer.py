"""The configuration's section `optimizer`, and its rules."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from parallel3d.config.sections.base import Fraction, Section


class OptimizerConfig(Section):
    """AdamW."""

    backend: Literal["torch", "apex", "auto"] = "torch"
    """What runs the update: torch's fused kernel, or NVIDIA apex's FusedAdam (CUDA; precision.policy fp32, fp16 or
    bf16; never run yet). auto: apex where it is installed and fits."""
    learning_rate: PositiveFloat
    """Peak learning rate; `lr_schedule` says how it is reached and left."""
    beta1: Fraction = 0.9
    """Decay of the first moment, per update."""
    beta2: Fraction = 0.95
    """Decay of the second moment, per update."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_norms_and_biases: bool = False
    """Apply the weight decay to norm weights and biases too (HLAT's runs did)."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm. Null: no clipping."""
