"""Stability figures of a run, part of the train state. Pure.

All ranks compute them from the same entries: the next leader has them after a loss, and a resumed run continues them.

The figures of a step (`figures`), one line of metrics.jsonl:

    loss_ratio        loss / lowest loss before (loss_ratio.py)
    perplexity        exp(loss)
    fraction_clipped  share of the updates so far whose gradient was clipped
    grad_spike        length of the current spike of the gradient norm (spikes.py); left out without one
    param_norm        l2 norm of all weights (master weights, if the policy has them)
    variance_norm     l1 norm of Adam's sqrt(v), without bias correction
    variance_max      the largest element of sqrt(v)

The last three belong to the state *before* the step's update: they travel in the step's one all-reduce.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import exp, isfinite
from typing import Any

from parallel3d.monitor.divergence import Divergence, FlatStreak
from parallel3d.monitor.loss_ratio import LossRatio
from parallel3d.monitor.spikes import Spikes

Json = dict[str, Any]

LARGEST_EXPONENT = 700.0


def perplexity(loss: float) -> Json:
    """exp(loss) as a figure; {} if it overflows or is not a number."""
    return {"perplexity": exp(loss)} if loss < LARGEST_EXPONENT else {}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The figures of a step that the monitors follow."""

    loss: float
    grad_norm: float | None
    """Before clipping; None if not finite: then the step has no update."""
    param_norm: float | None = None
    variance_norm: float | None = None
    variance_max: float | None = None
    """These three before the update; None if not measured."""


@dataclass(frozen=True, kw_only=True)
class TrainingMonitor:
    """The monitors' figures after the steps so far; immutable."""

    max_grad_norm: float | None = None
    """Gradients above it are clipped; a rule of the run, not saved."""
    loss_ratio: LossRatio = LossRatio()
    spikes: Spikes = Spikes()
    divergence: Divergence = Divergence()
    num_updates: int = 0
    num_clipped: int = 0
    newest: StepMetrics | None = None

    @property
    def fraction_clipped(self) -> float | None:
        """None before the first update, and without clipping."""
        return self.num_clipped / self.num_updates if self.num_updates and self.max_grad_norm is not None else None

    @property
    def divergence_reason(self) -> str:
        """Why the newest step shows divergence; empty when it does not."""
        return self.divergence.reason

    @property
    def stop_reason(self) -> str:
        """The same if divergence ends the run; else empty."""
        return self.divergence_reason if self.divergence.rules.ends_run else ""

    def after(self, step: StepMetrics) -> TrainingMonitor:
        """The figures after one more step."""
        has_updated = step.grad_norm is not None
        limit = self.max_grad_norm
        is_clipped = step.grad_norm is not None and limit is not None and step.grad_norm > limit
        ratio = self.loss_ratio.after(step.loss)
        return replace(
            self,
            loss_ratio=ratio,
            spikes=self.spikes.after(step.grad_norm if step.grad_norm is not None else float("nan")),
            divergence=self.divergence.after(
                loss=step.loss,
                loss_ratio=ratio.newest,
                is_clipped=is_clipped,
                variance_max=step.variance_max,
            ),
            num_updates=self.num_updates + (1 if has_updated else 0),
            num_clipped=self.num_clipped + (1 if is_clipped else 0),
            newest=step,
        )

    def figures(self) -> Json:
        """The figures of the newest step (see the module's docstring), without unknown ones."""
        step = self.newest
        if step is None:
            return {}
        known = {
            "loss_ratio": self.loss_ratio.newest,
            "fraction_clipped": self.fraction_clipped,
            "grad_spike": self.spikes.length or None,
            "param_norm": step.param_norm,
            "variance_norm": step.variance_norm,
            "variance_max": step.variance_max,
        }
        return perplexity(step.loss) | {
            name: value for name, value in known.items() if value is not None and isfinite(value)
        }

    def summary(self) -> Json:
        """The figures of the whole run."""
        ratio, spikes = self.loss_ratio, self.spikes
        return {
            "unstable_steps": ratio.num_unstable,
            "unstable_share": ratio.unstable_share,
            "largest_loss_ratio": ratio.largest,
            "fraction_clipped": self.fraction_clipped,
            "grad_spikes": {str(length): count for length, count in spikes.histogram.items()},
        }

    def to_json(self) -> Json:
        """The figures as JSON, without the rules."""
        spikes = {**asdict(self.spikes), "ended": [list(item) for item in sorted(self.spikes.ended.items())]}
        divergence = {name: value for name, value in asdict(self.divergence).items() if name != "rules"}
        return {
            "loss_ratio": asdict(self.loss_ratio),
            "spikes": spikes,
            "divergence": divergence,
            "num_updates": self.num_updates,
            "num_clipped": self.num_clipped,
            "newest": asdict(self.newest) if self.newest else None,
        }

    def from_json(self, data: Json) -> TrainingMonitor:
        """The saved figures under this monitor's rules."""
        spikes = data["spikes"]
        return replace(
            self,
            loss_ratio=LossRatio(**data["loss_ratio"]),
            spikes=Spikes(recent=tuple(spikes["recent"]), length=spikes["length"], ended=dict(spikes["ended"])),
            divergence=replace(
                self.divergence, **(data["divergence"] | {"row": FlatStreak(**data["divergence"]["row"])})
            ),
            num_updates=data["num_updates"],
            num_clipped=data["num_clipped"],
            newest=StepMetrics(**data["newest"]) if data["newest"] else None,
        )


NEW_MONITOR = TrainingMonitor()
"""Before the first step, without rules."""
