"""The steps that a rank has seen, for the summary and the checkpoints' index. Pure.

They go with the train state to workers that join: a run's figures do not depend on who leads it at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_SENT_LOSSES = 10_000
"""The newest ones: more than there are between two saves, and little beside a joiner's weights."""


@dataclass(kw_only=True)
class SeenSteps:
    """Losses and speed of these steps."""

    losses: dict[int, float] = field(default_factory=dict)
    """By step."""
    training_s: float = 0.0
    """Seconds of the steps that were timed; `timed_tokens` and `timed_flops` are theirs."""
    timed_tokens: int = 0
    timed_flops: float = 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "losses": sorted(self.losses.items())[-MAX_SENT_LOSSES:]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> SeenSteps:
        return SeenSteps(**{**data, "losses": {step: loss for step, loss in data["losses"]}})
