"""The figures of one run of a study, as they are kept between two calls of the command. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import median
from typing import Any

FINAL_STEPS = 10
"""The final training loss is the mean of this many."""


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run: its losses in nats a token, and how it ended."""

    name: str
    seed: int
    losses: tuple[float | None, ...]
    """Of each step; None: not finite."""
    grad_norms: tuple[float | None, ...]
    evaluation_loss: float | None
    tokens: int
    """Trained on."""
    step_s: float | None
    """Median; None where no step was timed."""
    ended: str = ""
    """Why it ended early; empty for a run that reached its end."""

    @property
    def final_loss(self) -> float | None:
        """The mean of the last steps; None if one of them is not finite, or if there is none."""
        last = [loss for loss in self.losses[-FINAL_STEPS:] if loss is not None and isfinite(loss)]
        return sum(last) / len(last) if last and len(last) == len(self.losses[-FINAL_STEPS:]) else None

    @property
    def judged_loss(self) -> float | None:
        """What studies compare: the evaluation's loss, or the final one of a run without evaluation; None for a run
        that ended early."""
        if self.ended:
            return None
        return self.final_loss if self.evaluation_loss is None else self.evaluation_loss

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        """Its figures without those of each step."""
        whole = {name: value for name, value in asdict(self).items() if name not in ("losses", "grad_norms")}
        return whole | {"num_steps": len(self.losses), "final_loss": self.final_loss}

    @staticmethod
    def from_json(data: dict[str, Any]) -> StudyRun:
        lists = {name: tuple(data[name]) for name in ("losses", "grad_norms")}
        return StudyRun(**{**data, **lists})

    @staticmethod
    def of_lines(name: str, seed: int, lines: Iterable[dict[str, Any]], *, ended: str = "") -> StudyRun:
        """The figures that the lines of a metrics.jsonl hold; of a repeated step the last line counts."""
        steps: dict[int, dict[str, Any]] = {}
        evaluation = None
        for line in lines:
            if line.get("event") == "evaluation":
                evaluation = line
            elif "event" not in line:
                steps[line["step"]] = line
        ordered = [steps[step] for step in sorted(steps)]
        last_step = max(steps, default=0)
        is_last = evaluation is not None and evaluation["step"] == last_step and last_step > 0
        times = [float(line["step_s"]) for line in ordered[1:] or ordered if line.get("step_s")]
        return StudyRun(
            name=name,
            seed=seed,
            losses=tuple(_number(line.get("loss")) for line in ordered),
            grad_norms=tuple(_number(line.get("grad_norm")) for line in ordered),
            evaluation_loss=_number(evaluation["loss"]) if evaluation is not None and is_last else None,
            tokens=int(ordered[-1].get("tokens", 0)) if ordered else 0,
            step_s=median(times) if times else None,
            ended=ended,
        )


def _number(value: Any) -> float | None:
    """metrics.jsonl has null, or a text such as "nan", for what is not finite."""
    return None if value is None or not isfinite(float(value)) else float(value)
