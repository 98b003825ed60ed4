"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that was looked at. A problem ends a run or its start; a warning makes it slow or fragile."""

    topic: str
    level: Level = "ok"
    text: str
    fix: str = ""
    """How to mend it; empty where nothing is wrong."""

    def __str__(self) -> str:
        label = {"ok": "OK"}.get(self.level, self.level)
        return f"{label:<8} {self.topic}: {self.text}" + (f"\n{'':<9}-> {self.fix}" if self.fix else "")
