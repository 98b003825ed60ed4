"""The learning rate as a function of the run's progress, in updates or in tokens trained.

A ramp rises linearly over its warmup, stays at its peak until the decay begins, and decays until it ends::

    peak      ____________
             /            \\
            /              \\______  min_ratio * peak
    0      /
           0  warmup  decay_begin  decay_end

Warmup and decay each have their own unit. GPT-3 counts both in tokens; "Sequence Length Warmup" (Li et al. 2022,
section 5.1) warms up over updates, since short sequences would prolong a warmup in tokens, and decays over tokens, so
that runs with other lengths have the same learning rate after the same number of tokens. Where the two overlap, the
lower value applies.

Two forms of decay reach `min_ratio`:

    floor   peak * (min_ratio + (1 - min_ratio) * shape)    decays all the way, ends at the floor
    clamp   peak * max(min_ratio, shape)                    decays towards 0, flat once it meets the floor (HLAT)

where shape goes from 1 to 0 between `decay_begin` and `decay_end`. A late `decay_begin` makes it warmup-stable-decay
(WSD: Hu et al. 2024, "MiniCPM"), of which the shape 1-sqrt is a form (Hägele et al. 2024, "Scaling laws and
compute-optimal training beyond fixed training durations").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from parallel3d.decay_shapes import find_shape

LrUnit = Literal["updates", "tokens"]


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """Linear warmup from 0 to `peak`, then the shape `kind` (decay_shapes.py) down to `min_ratio * peak`."""

    peak: float
    kind: str = "constant"
    warmup: int = 0
    warmup_unit: LrUnit = "updates"
    decay_begin: int = 0
    decay_end: int = 0
    """End of the decay. Every shape but constant is at its lowest from here on, even if decay_begin is later."""
    decay_unit: LrUnit = "updates"
    min_ratio: float = 0.0
    decay_form: Literal["floor", "clamp"] = "floor"

    def at(self, *, updates: float, tokens: float) -> float:
        """The value after `updates` updates on `tokens` tokens: 0 before the first if the ramp begins with a warmup.

        A trainer that wants its first update to have an effect counts it before it asks.
        """
        done: Mapping[LrUnit, float] = {"updates": updates, "tokens": tokens}
        return min(self._warmup_value(done[self.warmup_unit]), self._decay_value(done[self.decay_unit]))

    def _warmup_value(self, position: float) -> float:
        return self.peak * position / self.warmup if position < self.warmup else self.peak

    def _decay_value(self, position: float) -> float:
        shape = find_shape(self.kind)(self._decay_progress(position))
        if self.decay_form == "clamp":
            return self.peak * max(self.min_ratio, shape)
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * shape)

    def _decay_progress(self, position: float) -> float:
        """The part of the decay that lies behind `position`, in [0, 1]."""
        if position >= self.decay_end:
            return 1.0
        if position <= self.decay_begin:
            return 0.0
        return (position - self.decay_begin) / (self.decay_end - self.decay_begin)
