"""The notice that a checkpoint is complete, as a text in the terminal and in metrics.jsonl, and back. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAVED = re.compile(r"saved step (?P<step>\d+): (?P<path>.*), (?P<megabytes>[\d,]+\.\d) MB(?:;|$)")


@dataclass(frozen=True, kw_only=True)
class SavedNotice:
    """A checkpoint that was published."""

    step: int
    path: str
    megabytes: float

    def __str__(self) -> str:
        return f"saved step {self.step}: {self.path}, {self.megabytes:,.1f} MB"

    @staticmethod
    def parse(text: str) -> SavedNotice | None:
        """Reads a notice; None for one about something else."""
        if not (found := _SAVED.match(text)):
            return None
        megabytes = float(found["megabytes"].replace(",", ""))
        return SavedNotice(step=int(found["step"]), path=found["path"], megabytes=megabytes)
