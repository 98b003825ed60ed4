"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, "Mixed precision training", section 3.2). Pure.

fp16's range is 6e-8 to 65,504. Gradients are multiplied by a scale where they begin, in the head, while they are still
in the fp32 format, and divided by it in the main gradients. The scale is as large as possible: an iteration with an
infinity or a NaN makes no update and halves it, a number of finite ones doubles it. It is part of the train state, to
which all ranks apply the same entries; an entry records whether its iteration was finite. So all ranks agree on the
scale, and an iteration that is repeated after a loss has the same one.

Scales are powers of two: multiplying and dividing by them changes no bit, unless a value over- or underflows.

The head's gradients are those of the *sum* of the token losses, which for large batches would overflow at any scale
that helps single tokens. So they are also divided by the number of tokens of an iteration, rounded up to a power of
two: then the scale is that of the mean loss, as elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ldexp


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale and the rule by which it changes. By default gradients are not scaled."""

    scale: float = 1.0
    growth_interval: int | None = None
    """Finite iterations in a row after which the scale grows; None: it never changes."""
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    num_tokens_log2: int = 0
    """The loss is divided by 2 to this power: the tokens of an iteration, rounded up."""
    num_finite: int = 0
    """Finite iterations since the scale changed."""
    num_skipped_at_min_scale: int = 0
    """Iterations in a row that were not finite although the scale was already the smallest."""

    @property
    def is_dynamic(self) -> bool:
        return self.growth_interval is not None

    @property
    def factor(self) -> float:
        """The factor on the gradients of the sum of the token losses."""
        return ldexp(self.scale, -self.num_tokens_log2)

    def after(self, *, finite: bool) -> LossScale:
        """The scale for the next iteration."""
        if not self.is_dynamic:
            return self
        if not finite:
            scale = max(self.min_scale, self.scale * self.backoff_factor)
            num_skipped = self.num_skipped_at_min_scale + 1 if self.scale <= self.min_scale else 0
            return replace(self, scale=scale, num_finite=0, num_skipped_at_min_scale=num_skipped)
        if self.num_finite + 1 == self.growth_interval:
            return replace(self, scale=self.scale * self.growth_factor, num_finite=0, num_skipped_at_min_scale=0)
        return replace(self, num_finite=self.num_finite + 1, num_skipped_at_min_scale=0)


UNSCALED = LossScale()
