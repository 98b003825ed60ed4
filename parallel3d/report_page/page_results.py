"""What evaluations of checkpoints have found, for the page: a chart of each figure, its newest values, all of them;
for a terminal, the newest in brief. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil

from parallel3d.evaluation.result_figures import (
    FigureAtStep,
    FigureName,
    brief_names,
    format_figure,
    main_names,
    spoken,
)
from parallel3d.evaluation.results import format_cell
from parallel3d.report_page.page_chart import Chart, Series
from parallel3d.report_page.scales import MAX_POINTS, Curve

Results = Mapping[FigureName, Sequence[FigureAtStep]]
RESULT_COLUMNS = ("step", "tokens", "evaluated on", "figure", "value", "standard error")
UNITS = {"loss": "loss in nats per token"}


def plan_result_charts(
    names: Sequence[str], results: Sequence[Results], marks: tuple[tuple[int, str], ...]
) -> Iterator[Chart]:
    """Yields a chart for each main figure of a text, domain or task, with a curve for each run, by its name."""
    for number, name in enumerate(_chosen(results, main_names)):
        series = [
            _series(run, label, found[name]) for run, (label, found) in enumerate(zip(names, results)) if name in found
        ]
        unit = UNITS.get(name.figure, spoken(name.figure))
        yield Chart(name=f"result-{number}", title=name.subject, unit=unit, series=tuple(series), marks=marks)


def newest_results(results: Sequence[Results]) -> Iterator[tuple[str, ...]]:
    """Yields the name of each brief figure and its newest value of each run, with its step; "" for a run without it."""
    for name in _chosen(results, brief_names):
        cells = (found[name][-1] if name in found else None for found in results)
        yield (
            f"{name.subject}, {spoken(name.figure)}",
            *(f"{format_figure(each.value, each.stderr)} (step {each.step:,})" if each else "" for each in cells),
        )


def brief_results(results: Results) -> list[str]:
    """The newest value of each main figure, for example "step 40, files: a.txt, loss 4.5023 ± 0.0212"."""
    newest = [(name, results[name][-1]) for name in _chosen([results], main_names)]
    return [
        f"step {at.step:,}, {name.subject}, {spoken(name.figure)} {format_figure(at.value, at.stderr)}"
        for name, at in newest
    ]


def result_rows(results: Results) -> list[tuple[str, ...]]:
    """All figures of one run in the order of steps, as cells of RESULT_COLUMNS."""
    rows = ((at, name) for name, values in results.items() for at in values)
    return [
        (
            f"{at.step:,}",
            f"{at.tokens:,}",
            name.subject,
            spoken(name.figure),
            format_cell(at.value),
            format_cell(at.stderr),
        )
        for at, name in sorted(rows, key=lambda row: row[0].step)
    ]


def _series(run: int, label: str, values: Sequence[FigureAtStep]) -> Series:
    """The values, but of too many for a chart equally distant ones and the last: a mean is of no checkpoint."""
    shown = values[:: -ceil(len(values) / MAX_POINTS)][::-1]
    errors = [at.stderr or 0.0 for at in shown]
    curve = Curve(
        x=[at.step for at in shown],
        mean=[at.value for at in shown],
        low=[at.value - error for at, error in zip(shown, errors)],
        high=[at.value + error for at, error in zip(shown, errors)],
        steps_per_point=1,
    )
    return Series(run=run, label=label, curve=curve, kind="errors", errors=tuple(at.stderr for at in shown))


def _chosen(results: Sequence[Results], choose: Callable[[list[str]], list[str]]) -> Iterator[FigureName]:
    """Yields those figures of each text or task that `choose` returns of all that any run has of it."""
    figures: dict[tuple[str, str], dict[str, FigureName]] = {}
    for name in (name for each in results for name in each):
        figures.setdefault((name.set_name, name.group), {})[name.figure] = name
    for found in figures.values():
        yield from (found[figure] for figure in choose([*found]))
