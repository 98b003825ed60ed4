"""The precision policies: one row each says which number format is used where, how it is rounded, and how near two
layouts come with it. No torch, so that the configuration reads the same rows.

Gradients are added up, reduced and normed in `grad`; norms, softmax, loss and rotary tables use `keep_fp32`; with
`has_master` the optimizer keeps its own copy of the weights, in the format of its moments.

    policy      weights, activations    main gradients    moments    master weights    the update is stored
    fp32        fp32                    fp32              fp32       -                 -
    fp64        fp64                    fp64              fp64       -                 -
    fp16        fp16                    fp32              fp32       fp32              to the nearest
    bf16        bf16                    fp32              fp32       fp32              to the nearest
    bf16_sr     bf16                    bf16              bf16       -                 stochastically
    bf16_pure   bf16                    bf16              bf16       -                 to the nearest

fp16 scales its gradients until they are in the main gradients (`loss_scale.py`). HLAT (Fan et al. 2024, section III-D)
calls the bf16 row "mixed precision", and trained its 7B model with bf16_sr. bf16_pure differs from bf16_sr in the
rounding alone, for comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from parallel3d.number_formats import BF16, FP16, FP32, FP64, NumberFormat

Rounding = Literal["none", "nearest", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest relative differences that another order of adding explains."""

    loss: float
    """Of every step's loss and of the evaluation's."""
    first_gradients: float
    """Of the first step, made with the same weights: what one forward and backward pass rounds away."""
    gradients: float
    """Of the last step, and of every step's gradient norm."""
    weights: float
    """After the last step, without elements whose gradient is within tolerance of 0."""
    why: str


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """One precision policy."""

    name: str
    description: str
    """For the configuration's reference."""
    is_default: bool = False
    compute: NumberFormat
    """Weights as the layers see them, activations, messages between stages."""
    grad: NumberFormat
    """Main gradients: accumulation over micro-batches and reduction over replicas."""
    state: NumberFormat
    """Optimizer moments, and the master weights where there are any."""
    keep_fp32: NumberFormat
    """Norms, softmax, loss, rotary tables."""
    has_master: bool = False
    """Whether the optimizer updates a copy of the weights; without one `state` is `compute`."""
    update_rounding: Rounding = "none"
    """How weights and moments that are narrower than the update are stored; none: they are not narrower."""
    scales_loss: bool = False
    """Whether gradients are multiplied by `precision.loss_scale` until they are in the main gradients."""
    tolerance: Tolerance

    @property
    def rounds_stochastically(self) -> bool:
        """The update needs noise, and precision.stochastic_rounding may ask for more."""
        return self.update_rounding == "stochastic"

    @property
    def has_narrow_moments(self) -> bool:
        return self.state.num_bytes < FP32.num_bytes

    @property
    def fits_apex(self) -> bool:
        """NVIDIA apex's FusedAdam updates fp32 weights: the master weights, or the weights themselves."""
        return self.state is FP32


_FP64 = Tolerance(
    loss=1e-10,
    first_gradients=1e-10,
    gradients=1e-10,
    weights=1e-10,
    why="sums of thousands of terms in another order differ by some 1e-15 a step, which AdamW magnifies",
)
_FP32 = Tolerance(
    loss=1e-5,
    first_gradients=1e-4,
    gradients=1e-3,
    weights=1e-3,
    why="24 bits: 1e-6 is usual; AdamW divides by sqrt(v), which magnifies that where a gradient is near zero",
)
_FP16 = Tolerance(
    loss=2e-3,
    first_gradients=0.02,
    gradients=0.06,
    weights=0.01,
    why="activations of 11 bits, and layouts round at other places, before or after a tensor-parallel sum",
)
_BF16 = Tolerance(
    loss=1e-2,
    first_gradients=0.1,
    gradients=0.3,
    weights=0.05,
    why="activations (narrow policies: gradients and weights too) of 8 bits, and layouts round at other places, before"
    " or after a tensor-parallel sum",
)
# Measured on the tests' four-layer Llama, 3 steps, largest of five layouts (first gradients, last gradients, weights):
# fp64 1e-15, 4e-15, 8e-15; fp32 5e-7, 1e-6, 1e-6; fp16 2e-3, 8e-3, 2e-3; all of bf16 2e-2, 6e-2, 1e-2.


def _uniform(
    number_format: NumberFormat, *, tolerance: Tolerance, description: str, is_default: bool = False
) -> PolicySpec:
    return PolicySpec(
        name=number_format.name,
        description=description,
        is_default=is_default,
        compute=number_format,
        grad=number_format,
        state=number_format,
        keep_fp32=number_format,
        tolerance=tolerance,
    )


def _mixed(number_format: NumberFormat, *, tolerance: Tolerance, scales_loss: bool = False) -> PolicySpec:
    scaled = ", scaled by loss_scale" if scales_loss else ""
    return PolicySpec(
        name=number_format.name,
        description=f"compute in {number_format.name}{scaled}, with fp32 main gradients, master weights and moments",
        compute=number_format,
        grad=FP32,
        state=FP32,
        keep_fp32=FP32,
        has_master=True,
        scales_loss=scales_loss,
        tolerance=tolerance,
    )


def _narrow(name: str, rounding: Rounding, *, description: str) -> PolicySpec:
    return PolicySpec(
        name=name,
        description=description,
        compute=BF16,
        grad=BF16,
        state=BF16,
        keep_fp32=FP32,
        update_rounding=rounding,
        tolerance=_BF16,
    )


_ROWS = (
    _uniform(FP32, tolerance=_FP32, is_default=True, description="fp32 everywhere"),
    _uniform(FP64, tolerance=_FP64, description="fp64 everywhere, for tests"),
    _mixed(FP16, tolerance=_FP16, scales_loss=True),
    _mixed(BF16, tolerance=_BF16),
    _narrow(
        "bf16_sr", "stochastic", description="weights, gradients and moments in bf16, updates rounded stochastically"
    ),
    _narrow(
        "bf16_pure",
        "nearest",
        description="the same, rounded to the nearest, which loses small updates (for comparisons)",
    ),
)

POLICY_SPECS: dict[str, PolicySpec] = {row.name: row for row in _ROWS}
"""By name, which is `precision.policy`."""
DEFAULT_POLICY = next(row.name for row in _ROWS if row.is_default)


def names_of(fits: Callable[[PolicySpec], bool]) -> list[str]:
    """The policies with a property."""
    return [name for name, spec in POLICY_SPECS.items() if fits(spec)]
