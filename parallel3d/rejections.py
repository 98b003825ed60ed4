"""Connections that did not prove that they belong to the run (handshake.py), counted, with a notice at most once a
minute, and at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

REPORT_EVERY_S = 60.0


@dataclass
class Rejections:
    """Those of one listening end, `to`, since the last report."""

    to: str
    number: int = 0
    address: str = ""
    """Of the newest."""
    _reported_s: float = -REPORT_EVERY_S

    def add(self, address: str) -> None:
        self.number += 1
        self.address = address

    def report(self, now_s: float, *, is_last: bool = False) -> str:
        """Returns a notice, at most one a minute until the last; "" if there is nothing to say."""
        if not self.number or (now_s - self._reported_s < REPORT_EVERY_S and not is_last):
            return ""
        plural = "" if self.number == 1 else "s"
        text = (
            f"rejected {self.number} connection{plural} to {self.to} that did not prove the run's secret, "
            f"the last from {self.address}"
        )
        self.number, self._reported_s = 0, now_s
        return text
