"""Golden losses: those of a run that is known to be right, with which later runs are compared step by step. Pure.

What may differ between two runs of one configuration is the order of additions: another layout, device, thread count
or library. The difference grows with the steps. HLAT compares with a relative tolerance of 0.23, which hides real
mistakes. The defaults here are 1e-3 in fp32, where 50 steps on eight ranks stay within 1e-4 of one process
(docs/results.md), and 1e-2 or 2e-2 where activations have 11 or 8 bits and three steps may already differ by 2e-3 and
1e-2 (parallel3d/config/specs/policies.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RTOL = {"fp64": 1e-8, "fp32": 1e-3, "fp16": 1e-2}
WIDE_RTOL = 2e-2
"""Of the policies with bf16 activations."""
COMPARED_SECTIONS = ("model", "optimizer", "lr_schedule", "precision", "warmup", "data")
COMPARED_FIELDS = (
    ("run", "seed"),
    ("batch", "global_batch_size"),
    ("batch", "sequence_length"),
)
"""What decides a loss, apart from the layout."""
UNCOMPARED_FIELDS = (
    ("data", "cache_directory"),
    ("data", "prefetch"),
    ("precision", "sums"),
)


def default_rtol(policy: str) -> float:
    """The relative tolerance of a precision policy's losses."""
    return RTOL.get(policy, WIDE_RTOL)


@dataclass(frozen=True, kw_only=True)
class GoldenLosses:
    """The losses of a recorded run."""

    policy: str
    rtol: float
    losses: Mapping[int, float | None]
    """By step; None: not finite."""
    settings: Mapping[str, Any]
    """The fields that decide losses, by "section.field"."""

    def to_json(self) -> dict[str, Any]:
        losses = [[step, loss] for step, loss in sorted(self.losses.items())]
        return {"policy": self.policy, "rtol": self.rtol, "settings": dict(self.settings), "losses": losses}

    @staticmethod
    def from_json(data: dict[str, Any]) -> GoldenLosses:
        """Raises KeyError, TypeError or ValueError where `data` is something else."""
        return GoldenLosses(
            policy=str(data["policy"]),
            rtol=float(data["rtol"]),
            losses={int(step): None if loss is None else float(loss) for step, loss in data["losses"]},
            settings=dict(data["settings"]),
        )


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """Two losses of one step that differ."""

    step: int
    golden: float | None
    found: float | None
    """None: not finite, or the step is missing."""
    is_missing: bool = False

    @property
    def relative(self) -> float | None:
        """|found - golden| / |golden|; None if one is not a number."""
        if self.golden is None or self.found is None:
            return None
        return abs(self.found - self.golden) / max(abs(self.golden), 1e-30)

    def __str__(self) -> str:
        if self.is_missing:
            return f"step {self.step} is missing: the golden loss is {_text(self.golden)}"
        relative = "" if self.relative is None else f", relative {self.relative:.2e}"
        return f"step {self.step}: loss {_text(self.found)}, golden {_text(self.golden)}{relative}"


@dataclass(frozen=True, kw_only=True)
class GoldenComparison:
    """A run next to golden losses."""

    rtol: float
    num_steps: int
    """Golden steps."""
    first: LossDifference | None
    """The first difference beyond rtol; None if there is none."""
    num_different: int
    largest: LossDifference | None
    """The largest difference of two numbers, whether beyond rtol or not."""
    settings: tuple[str, ...]
    """Fields that decide losses and differ: "run.seed: 1, golden 2"."""

    @property
    def is_equal(self) -> bool:
        return self.first is None


def compare_with_golden(
    golden: GoldenLosses, losses: Mapping[int, float | None], settings: Mapping[str, Any], rtol: float | None = None
) -> GoldenComparison:
    """Compares every golden step; steps that only the run has are not judged."""
    limit = golden.rtol if rtol is None else rtol
    differences = [
        LossDifference(step=step, golden=loss, found=losses.get(step), is_missing=step not in losses)
        for step, loss in sorted(golden.losses.items())
    ]
    beyond = [each for each in differences if _is_beyond(each, limit)]
    numbers = [each for each in differences if each.relative is not None]
    names = sorted(golden.settings.keys() | settings.keys())
    return GoldenComparison(
        rtol=limit,
        num_steps=len(differences),
        first=beyond[0] if beyond else None,
        num_different=len(beyond),
        largest=max(numbers, key=lambda each: each.relative or 0.0, default=None),
        settings=tuple(
            f"{name}: {settings.get(name)!r}, golden {golden.settings.get(name)!r}"
            for name in names
            if settings.get(name) != golden.settings.get(name)
        ),
    )


def settings_that_decide(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a resolved configuration that decide losses, by name."""
    found = {f"{section}.{name}": config[section][name] for section, name in COMPARED_FIELDS}
    for section in COMPARED_SECTIONS:
        for name, value in config[section].items():
            if (section, name) not in UNCOMPARED_FIELDS:
                found[f"{section}.{name}"] = value
    return found


def _is_beyond(difference: LossDifference, rtol: float) -> bool:
    if difference.is_missing:
        return True
    if difference.golden is None or difference.found is None:
        return difference.golden is not difference.found
    return (difference.relative or 0.0) > rtol


def _text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.6f}"
