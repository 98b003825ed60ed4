"""Collects announced drains, so that all workers of a host are decided on together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

GATHER_DRAINS_S = 0.25
"""A host's workers announce their drains within moments of each other."""


class DrainQueue:
    """Drains that have been announced and not decided on; times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self.deadline_s = float("inf")
        """When they must be decided on."""

    def add(self, ranks: Iterable[int], now_s: float) -> None:
        if not self._ranks:
            self.deadline_s = now_s + GATHER_DRAINS_S
        self._ranks.update(ranks)

    def take(self, live: Collection[int], now_s: float) -> set[int]:
        """Returns and forgets the announced ranks, once the deadline has passed or all live ones have announced."""
        if now_s < self.deadline_s and not self._ranks.issuperset(live):
            return set()
        ranks, self._ranks, self.deadline_s = self._ranks, set(), float("inf")
        return ranks
