"""What uploads.jsonl says about the copies of a run's checkpoints in a remote store (checkpoint.upload)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

UPLOADS = "uploads.jsonl"
"""In the run folder: an event per line."""


@dataclass(kw_only=True)
class UploadHistory:
    """Counts of events, and what is missing there."""

    num_uploaded: int = 0
    num_bytes: int = 0
    newest_step: int | None = None
    """The step of the newest checkpoint that was sent."""
    num_retries: int = 0
    num_failures: int = 0
    behind: list[int] = field(default_factory=list)
    """Steps that the last failed attempt left here, and no later one has sent."""
    problem: str = ""
    """Why it failed."""

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> UploadHistory:
        history = cls()
        for event in events:
            history._add(event)
        return history

    def _add(self, event: Mapping[str, Any]) -> None:
        kind, step = event.get("event"), event.get("step")
        if kind == "uploaded" and isinstance(step, int):
            self.num_uploaded += 1
            self.num_bytes += event.get("bytes", 0)
            self.newest_step = max(step, self.newest_step or 0)
            self.behind = [each for each in self.behind if each != step]
        elif kind == "set_aside" and step == self.newest_step:
            self.newest_step = None  # the run has left that line
        elif kind == "retry":
            self.num_retries += 1
        elif kind == "failed":
            self.num_failures += 1
            self.behind, self.problem = list(event.get("behind", ())), event.get("text", "")
