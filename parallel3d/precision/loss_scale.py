"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, "Mixed precision training", section 3.2). Pure.

fp16 ends at 65,504 and 6e-8. Gradients are multiplied by a scale where they begin, in the head, while they are still in
the sensitive format, and divided by it again in the main gradients. The scale is as large as it can be: an iteration
with an infinity or a NaN updates nothing and halves it, a number of clean ones doubles it. It is part of the state that
is folded over the entries, in which all ranks have agreed whether the iteration was finite: so they agree on the scale,
and an iteration that is repeated after a loss has the same one.

Scales are powers of two: multiplying by them and dividing again changes no bit of what neither over- nor underflows.

The head's gradients are those of the *sum* of the token losses, which for large batches would overflow at any scale
that helps single tokens. So that the scale means what it means elsewhere, that of the mean loss, they are also divided
by the number of tokens of an iteration, rounded up to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ldexp


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale and the rule by which it moves; as it is by default gradients stay as they are."""

    scale: float = 1.0
    growth_interval: int | None = None
    """Finite iterations in a row after which the scale grows; None: it never moves."""
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    num_tokens_log2: int = 0
    """The loss is divided by so many tokens."""
    num_finite: int = 0
    """Finite iterations since the scale has moved."""
    num_skipped_at_min_scale: int = 0
    """Iterations in a row that were not finite although the scale was the smallest already."""

    @property
    def is_dynamic(self) -> bool:
        return self.growth_interval is not None

    @property
    def factor(self) -> float:
        """What gradients of the sum of the token losses are multiplied by."""
        return ldexp(self.scale, -self.num_tokens_log2)

    def after(self, *, finite: bool) -> LossScale:
        """The scale for the next iteration."""
        if not self.is_dynamic:
            return self
        if not finite:
            scale = max(self.min_scale, self.scale * self.backoff_factor)
            in_vain = self.num_skipped_at_min_scale + 1 if self.scale <= self.min_scale else 0
            return replace(self, scale=scale, num_finite=0, num_skipped_at_min_scale=in_vain)
        if self.num_finite + 1 == self.growth_interval:
            return replace(self, scale=self.scale * self.growth_factor, num_finite=0, num_skipped_at_min_scale=0)
        return replace(self, num_finite=self.num_finite + 1, num_skipped_at_min_scale=0)


UNSCALED = LossScale()
