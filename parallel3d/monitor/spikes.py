"""Finds spikes of the gradient norm and their lengths (HLAT, Fan et al. 2024, section III-C, Figure 2). Pure.

r is the mean of the gradient norms of the 20 steps before. A spike starts with a norm above r + 0.1 and lasts while
norms stay above; its length is the number of such steps. Norms within a spike are part of r, as in the paper's running
average, so that a norm which stays at a higher level for good is a spike of about 20 steps at most. No step is a spike
before 20 norms are known. A non-finite norm belongs to a spike and is left out of r.

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
    """Spikes in the gradient norms so far; immutable."""

    recent: tuple[float, ...] = ()
    """The last finite norms, at most WINDOW of them."""
    length: int = 0
    """Length of the current spike; 0 if the last step was not in one."""
    ended: Mapping[int, int] = field(default_factory=dict)
    """Number of ended spikes by length."""

    @property
    def histogram(self) -> dict[int, int]:
        """Number of spikes by length, the current one included."""
        counts = dict(self.ended)
        if self.length:
            counts[self.length] = counts.get(self.length, 0) + 1
        return dict(sorted(counts.items()))

    @property
    def single_step_share(self) -> float | None:
        """Share of spikes that last one step; None without spikes."""
        total = sum(self.histogram.values())
        return self.histogram.get(1, 0) / total if total else None

    def after(self, grad_norm: float) -> Spikes:
        """The spikes after one more step."""
        is_known = len(self.recent) == WINDOW
        is_spike = is_known and not grad_norm <= fsum(self.recent) / WINDOW + MARGIN  # a NaN is above everything
        recent = (*self.recent, grad_norm)[-WINDOW:] if isfinite(grad_norm) else self.recent
        if is_spike:
            return replace(self, recent=recent, length=self.length + 1)
        return Spikes(recent=recent, ended=self.histogram)
