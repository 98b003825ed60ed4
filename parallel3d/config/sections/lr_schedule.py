"""The configuration's section `lr_schedule`, and its rules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from parallel3d.config.sections.base import Fraction, Section


class LrScheduleConfig(Section):
    """The learning rate: linear warmup, a plateau, decay; by updates or by tokens trained."""

    kind: Literal["constant", "linear", "cosine", "1-sqrt"] = "cosine"
    """Shape after the warmup and the plateau. linear and 1-sqrt with a plateau_ratio are WSD (warmup-stable-decay)."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warmup from 0; at most decay_steps, where that is given. Excludes warmup_tokens."""
    warmup_tokens: PositiveInt | None = None
    """The same in tokens trained (GPT-3's way); at most decay_tokens, where that is given. Null: warmup_steps."""
    plateau_ratio: Fraction = 0.0
    """Share of what lies between the warmup and the end of the decay that is spent at the peak."""
    decay_steps: PositiveInt | None = None
    """Update at which the decay ends, counted from the run's start, warmup included. Excludes decay_tokens. Null: the
    run's last step, where decay_tokens is null too."""
    decay_tokens: PositiveInt | None = None
    """The same in tokens trained: the learning rate then depends on them alone, whatever the lengths of sequences or
    batches were. Null: decay_steps."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Lowest learning rate after the warmup, as a share of the peak."""
    decay_form: Literal["floor", "clamp"] = "floor"
    """floor: decays from 1 to min_ratio; clamp: decays from 1 to 0 but stops at min_ratio (HLAT's)."""
