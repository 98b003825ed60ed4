"""The configuration's section `precision`, and its rules."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from parallel3d.config.sections.base import Section


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
    policy: Literal["fp32", "fp64", "fp16", "bf16", "bf16_sr", "bf16_pure"] = "fp32"
    """fp32; fp64 (for tests); fp16, bf16: 16-bit compute with fp32 main gradients, master weights and moments; bf16_sr:
    weights, gradients and moments in bf16, updates rounded stochastically; bf16_pure: the same, rounded to the nearest,
    which loses small updates (for comparisons)."""
    stochastic_rounding: list[Literal["update", "accumulation", "outputs"]] = []
    """What policy bf16_sr rounds stochastically beside the update, which it always does: accumulation, each
    micro-batch's gradients as they are added; outputs, those of the linear layers in training. Slow: to try out what
    hardware does that rounds so everywhere."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """How policy fp16 scales gradients; without effect on the others."""
