"""Hosts that will be taken away, by their guardians' notices. Pure.

A machine may come back under its name, so what counts are the workers that were there at the notice.
"""

from __future__ import annotations

from collections.abc import Iterable

END_BEFORE_S = 2.0
"""Workers that are still on a host so long before it is gone are ended: their loss is noticed at once."""


class Preemptions:
    """The workers whose hosts have a notice; times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._why: dict[int, str] = {}
        self._due_s: dict[int, float] = {}
        """When each worker is ended that has not left."""

    def add(self, host: str, ranks: Iterable[int], text: str, *, due_s: float) -> list[int]:
        """Adds the workers of a host that is gone at `due_s`; returns those that are new."""
        new = [rank for rank in ranks if rank not in self._why]
        self._why |= dict.fromkeys(new, f"host {host} is taken away ({text})")
        self._due_s |= dict.fromkeys(new, due_s - END_BEFORE_S)
        return new

    def why(self, ranks: Iterable[int]) -> str:
        """Returns which hosts of these workers are taken away, "" if none is."""
        return "; ".join(dict.fromkeys(self._why[rank] for rank in ranks if rank in self._why))

    def take_due(self, now_s: float) -> dict[int, str]:
        """Returns the workers whose time is over, each once, and why."""
        due = [rank for rank, due_s in self._due_s.items() if now_s >= due_s]
        for rank in due:
            del self._due_s[rank]
        return {rank: self._why[rank] for rank in due}
