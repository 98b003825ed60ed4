"""Spikes of the gradient norm and how long they last (HLAT, Fan et al. 2024, section III-C, Figure 2). Pure.

r is the mean of the gradient norms of the 20 steps before. A spike begins with a norm above r + 0.1 and lasts while
norms stay there; its length is the number of such steps. r goes on moving meanwhile: norms within a spike are part of
it (the paper's running average leaves none out), so that a norm which stays on a higher level for good is a spike of
about 20 steps at most. No step is a spike before 20 norms are known. A norm that is not finite
belongs to a spike and is left out of r.

HLAT-7B: more than 86 % of the spikes last for a single step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import fsum, isfinite

WINDOW = 20
MARGIN = 0.1


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """A fold over the gradient norms of a run, step by step."""

    recent: tuple[float, ...] = ()
    """The last finite norms, at most WINDOW."""
    length: int = 0
    """Steps of the spike that lasts; 0: the last step was none."""
    ended: Mapping[int, int] = field(default_factory=dict)
    """How many spikes had which length, of those that are over."""

    @property
    def histogram(self) -> dict[int, int]:
        """Number of spikes by length, one that still lasts included."""
        counts = dict(self.ended)
        if self.length:
            counts[self.length] = counts.get(self.length, 0) + 1
        return dict(sorted(counts.items()))

    @property
    def single_step_share(self) -> float | None:
        """Share of the spikes that last for one step; None without spikes."""
        total = sum(self.histogram.values())
        return self.histogram.get(1, 0) / total if total else None

    def after(self, grad_norm: float) -> Spikes:
        """The fold with one more step."""
        is_known = len(self.recent) == WINDOW
        is_spike = is_known and not grad_norm <= fsum(self.recent) / WINDOW + MARGIN  # a NaN is above everything
        recent = (*self.recent, grad_norm)[-WINDOW:] if isfinite(grad_norm) else self.recent
        if is_spike:
            return replace(self, recent=recent, length=self.length + 1)
        return Spikes(recent=recent, ended=self.histogram)
