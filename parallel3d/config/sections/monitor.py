"""The configuration's section `monitor`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from parallel3d.config.sections.base import Section


class MonitorConfig(Section):
    """What is recorded of a run's course beside its loss, and what ends a run that has diverged."""

    norms_every: PositiveInt | None = 1
    """Steps between two measurements of the weights' l2 norm, and of the l1 norm and the largest element of Adam's
    sqrt(v): a pass over the weights and one over the second moments that a rank owns. Null: never."""
    divergence: Literal["stop", "warn"] = "stop"
    """stop: a run that has diverged ends with exit code 6, its step and the reason. warn: it says so and goes on (not
    where a loss is NaN or infinite: that always stops). Diverged: max_loss_ratio; or, for about 1.4 / (1 - beta2)
    updates in a row, the loss is more than 1.2 times the lowest before and does not fall, all gradients are clipped,
    and the largest sqrt(v) is flat."""
    max_loss_ratio: Annotated[float, Field(gt=1)] | None = None
    """A step whose loss is more than so many times the lowest before has diverged. Null: a loss may rise."""
    peak_flops: PositiveFloat | None = None
    """What a rank's device can do, in FLOP/s, for MFU. Null: the vendor's figure; of CPUs and unknown devices what a
    matrix product reaches at the start."""
    tensorboard: bool = False
    """Write the figures of every step for TensorBoard too, into tensorboard/ in the run's folder."""
