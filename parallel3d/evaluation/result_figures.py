"""The figures of a run's evaluated checkpoints, one by one, each with its standard error. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeGuard

from parallel3d.evaluation.results import format_cell

COUNTS = ("tokens", "words", "bytes", "passages")
"""Sizes of what was evaluated."""
BRIEF = ("loss", "perplexity", "accuracy")
"""Figures of texts and last words that stand in short tables."""

ResultHistory = Mapping[str, Sequence[Mapping[str, Any]]]
"""By set, a row for each checkpoint, in the order of steps: `step`, `tokens`, and `results` by text or task."""


@dataclass(frozen=True, kw_only=True)
class FigureName:
    """A figure: the set, the text, domain or task of it, and what was measured."""

    set_name: str
    group: str
    figure: str

    @property
    def subject(self) -> str:
        """The set and the text, domain or task."""
        return f"{self.set_name}: {self.group}"


@dataclass(frozen=True, kw_only=True)
class FigureAtStep:
    """A figure of one checkpoint; `tokens` are those trained until then."""

    step: int
    tokens: int
    value: float
    stderr: float | None
    """Its standard error, where the result has one."""


def figures_by_name(history: ResultHistory) -> dict[FigureName, list[FigureAtStep]]:
    """Every figure that is a finite number, over the checkpoints; sizes and standard errors are none of their own."""
    found: dict[FigureName, list[FigureAtStep]] = {}
    for set_name, rows in history.items():
        for row in rows:
            for group, figures in row["results"].items():
                for figure, value, stderr in _finite_figures(figures):
                    name = FigureName(set_name=set_name, group=group, figure=figure)
                    at = FigureAtStep(step=row["step"], tokens=row["tokens"], value=value, stderr=stderr)
                    found.setdefault(name, []).append(at)
    return found


def _finite_figures(figures: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """Yields name, value and standard error of each."""
    for name, value in figures.items():
        if name not in COUNTS and "stderr" not in name and _is_finite(value):
            error = figures.get(stderr_name(name))
            yield name, float(value), float(error) if _is_finite(error) else None


def stderr_name(figure: str) -> str:
    """The library names figures of filtered answers "metric,filter", and their errors "metric_stderr,filter"."""
    metric, comma, answers = figure.partition(",")
    return f"{metric}_stderr{comma}{answers}"


def main_names(figures: Iterable[str]) -> list[str]:
    """The loss of a text, the accuracy of last words, and of a task all but standard errors."""
    names = [*figures]
    main = [name for name in names if name in ("loss", "accuracy")]
    return main[:1] or [name for name in names if "stderr" not in name]


def main_figures(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The main figures of each text or task."""
    return {f"{group}: {name}": figures[name] for group, figures in results.items() for name in main_names(figures)}


def brief_names(figures: Iterable[str]) -> list[str]:
    """The loss and perplexity of a text, the accuracy and perplexity of last words, and all figures of a task."""
    names = [*figures]
    is_task = "loss" not in names and "accuracy" not in names
    return [name for name in names if name in BRIEF or is_task]


def describe_figures(figures: Mapping[str, Any]) -> str:
    """The brief figures of a text or task in a line."""
    brief = brief_names(figures)
    chosen = (each for each in _finite_figures(figures) if each[0] in brief)
    return ", ".join(f"{spoken(name)} {format_figure(value, stderr)}" for name, value, stderr in chosen)


def spoken(figure: str) -> str:
    """A figure's name as people read it."""
    return figure.replace("_", " ")


def format_figure(value: float, stderr: float | None) -> str:
    """For example 4.5023 ± 0.0212."""
    return format_cell(value) + ("" if stderr is None else f" ± {format_cell(stderr)}")


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and isfinite(value)
