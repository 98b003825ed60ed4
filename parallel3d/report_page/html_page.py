"""The page as one HTML file: no network, readable without scripts, on a phone, in the dark, by a screen reader."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template

from parallel3d.pipeline.planner import Plan
from parallel3d.report_page.page_chart import Chart
from parallel3d.report_page.page_data import PageData, RunPage
from parallel3d.report_page.page_events import CheckpointRow
from parallel3d.report_page.page_results import RESULT_COLUMNS
from parallel3d.report_page.scales import format_number
from parallel3d.report_page.svg_chart import BOTTOM, LEFT, NUM_COLOURS, RIGHT, TOP, WIDTH, draw_chart, scales_of
from parallel3d.report_page.timeline_chart import draw_timeline, kinds_of

SWATCHES = {"dots": " dot", "spikes": " spike", "planned": " dashed"}
"""Kinds of series whose sign in the legend is not a solid line, and its style."""
OPEN_RESULT_CHARTS = 12
"""Charts of results that are not folded."""
FOLDER = Path(__file__).parent
PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:$connect">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$css</style>
</head>
<body$version>
<header><h1>$title</h1>$status</header>
<main>
<section class="$alone" aria-labelledby="h-figures"><h2 id="h-figures">Figures</h2>$figures</section>
<section aria-labelledby="h-charts"><h2 id="h-charts">Charts</h2>
<p class="hint">$hint</p>
$charts</section>
$results$details
</main>
<footer>Written $written by parallel3d. This file needs no network.</footer>
<script type="application/json" id="data">$data</script>
<script>$js</script>$live
</body>
</html>
"""
)


WAITING = Template(
    """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>parallel3d</title><style>$css</style></head>
<body data-version="$version"><main><p>$text</p><p class="hint">This page goes on as soon as there is a step.</p></main>
<script>$live</script></body></html>
"""
)


def render_waiting_page(text: str, *, version: str) -> str:
    """The page that a server shows before the first step."""
    css, live = (FOLDER / "page.css").read_text(), (FOLDER / "live.js").read_text()
    return WAITING.substitute(text=escape(text), css=css, live=live, version=escape(version))


def render_page(page: PageData, *, now_s: float, version: str | None = None) -> str:
    """The HTML text; `now_s` is when it was written, in seconds since the epoch.

    `version` is that of a served page, which looks for newer ones; without it the page needs no network.
    """
    charts = [*page.charts, *page.result_charts]
    title = escape(" and ".join(run.name for run in page.runs))
    longest = max(series.curve.steps_per_point for chart in page.charts for series in chart.series)
    hint = "Over training steps. Point at a chart, or focus it and press the arrow keys, to read its values."
    if longest > 1:
        hint += f" Long curves show the mean of up to {longest:,} steps, and a band from the lowest to the highest."
    live = f"<script>{(FOLDER / 'live.js').read_text()}</script>" if version else ""
    return PAGE.substitute(
        title=title,
        alone="alone" if len(page.runs) == 1 else "several",
        version=f' data-version="{escape(version)}"' if version else "",
        connect="; connect-src 'self'" if version else "",
        live=live,
        css=(FOLDER / "page.css").read_text(),
        js=(FOLDER / "page.js").read_text(),
        status="".join(_status(number, run, len(page.runs)) for number, run in enumerate(page.runs)),
        figures=_figure_table(page.runs),
        hint=hint,
        charts=_charts([_figure(chart, is_alone=len(page.runs) == 1) for chart in page.charts]),
        results=_results(page),
        details="".join(_details(number, run) for number, run in enumerate(page.runs)),
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s)),
        data=_embed({"frame": [LEFT, RIGHT, TOP, BOTTOM, WIDTH], "charts": [*map(_chart_data, charts)]}),
    )


def _chart_data(chart: Chart) -> dict[str, object]:
    x, y = scales_of(chart)
    return {**asdict(chart), "x": [x.low, x.high], "y": [y.low, y.high], "is_log": y.is_log}


def _embed(value: object) -> str:
    """JSON that ends no script element, whatever its strings hold."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")


def _status(number: int, run: RunPage, num_runs: int) -> str:
    swatch = f'<span class="swatch c{number % NUM_COLOURS}"></span>{escape(run.name)}: ' if num_runs > 1 else ""
    return f'<p class="status">{swatch}{escape(run.status)}</p>'


def _figure_table(runs: Sequence[RunPage]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.figures))
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    return _table(
        "Figures", head, ([name, *(run.figures.get(name, "") for run in runs)] for name in names), row_heads=True
    )


def _results(page: PageData) -> str:
    """What evaluations of checkpoints have found; nothing without any."""
    damages = [text for run in page.runs for text in run.result_damages]
    if not page.newest_results and not damages:
        return ""
    is_alone = len(page.runs) == 1
    head = [] if is_alone else ["", *(run.name for run in page.runs)]
    drawn = [_figure(chart, is_alone=is_alone) for chart in page.result_charts]
    has_errors = any(error is not None for c in page.result_charts for each in c.series for error in each.errors)
    parts = ['<section aria-labelledby="h-results"><h2 id="h-results">Evaluations of checkpoints</h2>']
    parts += [f'<p class="hint">Left out: {escape(text)}</p>' for text in damages]
    if not page.newest_results:
        return "".join([*parts, "</section>"])
    if has_errors:
        parts.append('<p class="hint">Vertical bars are standard errors.</p>')
    parts.append(_charts(drawn[:OPEN_RESULT_CHARTS]))
    if folded := drawn[OPEN_RESULT_CHARTS:]:
        parts.append(_folded(f"{len(folded):,} more charts", _charts(folded)))
    table = _table("Newest results", head, page.newest_results, row_heads=True)
    parts.append(
        f'<h3>Newest results</h3><div class="{"alone wide" if is_alone else "several"}">{table}</div></section>'
    )
    return "".join(parts)


def _charts(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _figure(chart: Chart, *, is_alone: bool) -> str:
    unit = f' <span class="unit">{escape(chart.unit)}</span>' if chart.unit else ""
    legend = "".join(
        f'<span><span class="swatch c{series.run % NUM_COLOURS}{SWATCHES.get(series.kind, "")}"></span>'
        f"{escape(series.label)}</span>"
        for series in chart.series
    )
    has_legend = len(chart.series) > 1 or not is_alone
    return (
        f'<figure data-chart="{chart.name}"><figcaption>{escape(chart.title)}{unit}</figcaption>'
        f"{draw_chart(chart)}"
        + (f'<div class="legend">{legend}</div>' if has_legend else "")
        + '<output aria-live="polite">&nbsp;</output></figure>'
    )


def _timeline(number: int, plan: Plan, bubbles: Sequence[tuple[str, float]]) -> str:
    """The planned pipeline, in a box that scrolls: with the keyboard, too."""
    legend = "".join(
        f'<span><span class="swatch box {letter}"></span>{escape(name)}</span>' for name, letter in kinds_of(plan)
    )
    shares = ", ".join(f"bubble {label} {share:.1%}" for label, share in bubbles)
    caption = f"One step of one pipeline: {plan.request.name}, {len(plan.routes)} micro-batches"
    return (
        f'<h3>Planned pipeline</h3><figure class="timeline"><figcaption>{escape(caption)}'
        f' <span class="unit">{escape(shares)}</span></figcaption>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Planned pipeline">'
        f"{draw_timeline(plan, f'plan-{number}')}</div>"
        f'<div class="legend">{legend}<span><span class="swatch box idle"></span>idle</span></div></figure>'
    )


def _details(number: int, run: RunPage) -> str:
    parts = [f'<section aria-labelledby="run-{number}"><h2 id="run-{number}">{escape(run.name)}</h2>']
    if run.plan is not None:
        parts.append(_timeline(number, run.plan, run.bubbles))
    if run.changes:
        rows = (
            [f"{row.step:,}", row.what, row.widths, *(_or_nothing(each) for each in (row.seconds, row.loss_ratio))]
            for row in run.changes
        )
        head = ["step", "what", "replicas of each stage", "seconds", "loss ratio"]
        parts.append(f"<h3>Changes of membership</h3>{_table('Changes of membership', head, rows)}")
    if run.evaluations:
        rows = ([f"{step:,}", f"{loss:.4f}"] for step, loss in run.evaluations)
        parts.append(_folded("Evaluations", _table("Evaluations", ["step", "loss"], rows)))
    if run.results:
        left_out = run.num_results - len(run.results)
        name = f"Results of checkpoints{f' (without the first {left_out:,})' if left_out else ''}"
        parts.append(_folded(name, _table("Results of checkpoints", RESULT_COLUMNS, run.results)))
    if run.checkpoints:
        left_out = run.num_checkpoints - len(run.checkpoints)
        name = f"Checkpoints (without the first {left_out:,})" if left_out else "Checkpoints"
        head = ["step", "MB", "saved (UTC)", "uploaded (UTC)"]
        parts.append(_folded(name, _table("Checkpoints", head, map(_checkpoint_cells, run.checkpoints))))
    if run.commands:
        parts.append("<h3>Repeat it</h3>")
    for caption, command in run.commands:
        parts.append(f'<p class="hint">{escape(caption)}</p>' if caption else "")
        parts.append(f"<pre>{escape(command)}</pre>")
    if run.notices:
        left_out = run.num_notices - len(run.notices)
        rows = ([_time_text(at), text] for at, text in run.notices)
        name = f"Messages (without the first {left_out:,})" if left_out else "Messages"
        parts.append(_folded(name, _table("Messages", ["time (UTC)", "text"], rows)))
    if run.environment:
        parts.append(
            _folded(
                "Environment", _table("Environment", [], ([*each] for each in run.environment.items()), row_heads=True)
            )
        )
    if run.config:
        parts.append(_folded("Configuration", f"<pre>{escape(json.dumps(run.config, indent=2))}</pre>"))
    return "".join([*parts, "</section>"])


def _checkpoint_cells(row: CheckpointRow) -> list[str]:
    sent = "" if row.uploaded_at is None else _time_text(row.uploaded_at)
    return [f"{row.step:,}", f"{row.megabytes:,.1f}", _time_text(row.saved_at), sent]


def _time_text(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.gmtime(seconds))


def _folded(name: str, content: str) -> str:
    return f"<details><summary>{escape(name)}</summary>{content}</details>"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, row_heads: bool = False) -> str:
    """A table whose caption only screen readers show: a heading above it says the same.

    The roles repeat what the elements are, which browsers forget where style lays a table out in columns.
    """
    parts, style = "".join(_table_parts(head, rows, row_heads)), " class=facts" if row_heads else ""
    return f'<div class="scroll"><table role=table{style}><caption>{escape(caption)}</caption>{parts}</table></div>'


def _table_parts(head: Sequence[str], rows: Iterable[Sequence[str]], row_heads: bool) -> Iterator[str]:
    if head:
        cells = "".join(
            f"<th scope=col role=columnheader>{escape(each)}</th>" if each else "<td></td>" for each in head
        )
        yield f"<thead role=rowgroup><tr role=row>{cells}</tr></thead>"
    yield "<tbody role=rowgroup>"
    for first, *rest in rows:
        tag = "th scope=row role=rowheader" if row_heads else "td role=cell"
        cells = "".join(f"<td role=cell>{escape(each)}</td>" for each in rest)
        yield f"<tr role=row><{tag}>{escape(first)}</{tag.split()[0]}>{cells}</tr>"
    yield "</tbody>"


def _or_nothing(value: float | None) -> str:
    return "" if value is None else format_number(value)
