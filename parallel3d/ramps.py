"""Values that follow the run's progress: learning rate now, batch size and sequence length by the same rule.

A ramp rises linearly over its warmup, then stays or decays until `decay_end`. `warmup`, `decay_end` and the position
given to `at` share one unit, which the caller chooses: updates, or tokens trained.

Two forms of decay reach `min_ratio`:

    floor   peak * (min_ratio + (1 - min_ratio) * shape)    decays all the way, ends at the floor
    clamp   peak * max(min_ratio, shape)                    decays towards 0, flat once it meets the floor (HLAT)

where shape goes from 1 to 0 between `warmup` and `decay_end`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Linear warmup from 0 to `peak`, then one of SHAPES down to `min_ratio * peak`."""

    peak: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    decay_end: int = 0
    min_ratio: float = 0.0
    form: Literal["floor", "clamp"] = "floor"

    def at(self, position: float) -> float:
        """The value at `position`: 0 before anything was trained, where a warmup's value is 0 too.

        A trainer that wants its first update to count asks for `at(num_updates + 1)`.
        """
        if position < self.warmup:
            return self.peak * position / self.warmup
        shape = SHAPES[self.kind](self._decayed(position))
        if self.form == "clamp":
            return self.peak * max(self.min_ratio, shape)
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * shape)

    def _decayed(self, position: float) -> float:
        """The part of the decay that lies behind `position`, in [0, 1]."""
        if position >= self.decay_end:
            return 1.0
        return (position - self.warmup) / (self.decay_end - self.warmup)
