"""The configuration's section `lr_schedule`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from parallel3d.config.named import check_named, schema_of_names
from parallel3d.config.rule import excludes, rule, too_large
from parallel3d.config.sections.section import Fraction, Section
from parallel3d.decay_shapes import SHAPE_NAMES, find_shape
from parallel3d.errors import Problem

LrScheduleName = Annotated[str, check_named(SHAPE_NAMES, find_shape), schema_of_names(SHAPE_NAMES)]
"""One of SHAPE_NAMES, or "package:function"."""


class LrScheduleConfig(Section):
    """The learning rate: linear warmup, a plateau, decay; in updates or in tokens trained."""

    kind: LrScheduleName = "cosine"
    """Shape after the warmup and the plateau. linear and 1-sqrt with a plateau_ratio are WSD (warmup-stable-decay). Or
    a function of your own as "package:function" (docs/extending.md)."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warmup from 0; at most decay_steps, if that is set. Excludes warmup_tokens."""
    warmup_tokens: PositiveInt | None = None
    """Length of the warmup in tokens trained (as in GPT-3); at most decay_tokens, if that is set. Null:
    warmup_steps."""
    plateau_ratio: Fraction = 0.0
    """Share of the time between the end of the warmup and the end of the decay that is spent at the peak."""
    decay_steps: PositiveInt | None = None
    """Update at which the decay ends, counted from the run's start, warmup included. Excludes decay_tokens. Null: the
    run's last step, unless decay_tokens is set."""
    decay_tokens: PositiveInt | None = None
    """Tokens trained at which the decay ends. The learning rate then depends on tokens alone, whatever the lengths of
    sequences or batches. Null: decay_steps."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Lowest learning rate after the warmup, as a share of the peak."""
    decay_form: Literal["floor", "clamp"] = "floor"
    """floor: decays from 1 to min_ratio. clamp: decays from 1 to 0 but stops at min_ratio (HLAT's code)."""


LR_AMOUNTS = "lr_schedule: warmup_steps warmup_tokens decay_steps decay_tokens"


@rule(LR_AMOUNTS)
def check_lr_schedule_units(lr_schedule: LrScheduleConfig) -> Iterator[Problem]:
    """The warmup, and the decay, are in updates or in tokens."""
    for part in ("warmup", "decay"):
        steps, tokens = getattr(lr_schedule, f"{part}_steps"), getattr(lr_schedule, f"{part}_tokens")
        if steps and tokens is not None:
            why = "one counts updates, the other tokens"
            yield excludes(f"lr_schedule.{part}_tokens", tokens, f"lr_schedule.{part}_steps", steps, why)


@rule(LR_AMOUNTS, "lr_schedule.kind")
def check_lr_warmup(lr_schedule: LrScheduleConfig, kind: str) -> Iterator[Problem]:
    """The warmup ends before the decay does. A trial run may end within its warmup: that is only a warning."""
    for unit in ("steps", "tokens"):
        warmup, end = getattr(lr_schedule, f"warmup_{unit}"), getattr(lr_schedule, f"decay_{unit}")
        if kind != "constant" and end is not None and warmup is not None and warmup > end:
            yield too_large(
                f"lr_schedule.warmup_{unit}", warmup, f"lr_schedule.decay_{unit}", end, "the schedule ends there"
            )
