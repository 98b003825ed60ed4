"""From the files of one run or several to what their page shows: charts, figures, events. Pure.

Runs are compared by step. A chart that no run has values for is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from parallel3d.evaluation.result_figures import ResultHistory, figures_by_name
from parallel3d.monitor.flops import describe_mfu
from parallel3d.monitor.history import MetricsLog, analyse, ratios_of
from parallel3d.monitor.loss_ratio import UNSTABLE_RATIO
from parallel3d.monitor.uptime import RunHistory
from parallel3d.pipeline.planner import Plan
from parallel3d.report_page.page_chart import Chart, ReferenceLine, Series, reference_lines
from parallel3d.report_page.page_events import (
    CheckpointRow,
    checkpoint_figures,
    checkpoints_of,
    dollar_figures,
    gradient_spikes,
    loss_spikes,
    messages_of,
)
from parallel3d.report_page.page_results import newest_results, plan_result_charts, result_rows
from parallel3d.report_page.repeat_commands import COMMAND_FACTS, repeat_commands
from parallel3d.report_page.scales import Curve, Points
from parallel3d.report_page.watched_run import describe_change, format_widths, seconds_of_change

Json = dict[str, Any]
MAX_NOTICES = 200
MAX_RESULTS = 1000
"""Newest figures of checkpoints that are listed."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run, as far as they are there."""

    name: str
    lines: Sequence[Json]
    """Of metrics.jsonl."""
    config: Json = field(default_factory=dict)
    environment: Json = field(default_factory=dict)
    """Of the newest leg."""
    first_environment: Json = field(default_factory=dict)
    """Of the first of several legs."""
    summary: Json = field(default_factory=dict)
    uploads: Sequence[Json] = ()
    """Of uploads.jsonl."""
    results: ResultHistory = field(default_factory=dict)
    """What evaluations of its checkpoints have found (evaluation/result_history.py)."""
    result_damages: Sequence[str] = ()
    """Why sets of results are left out."""
    plan: Plan | None = None
    """The plan of its pipeline, if it is to be drawn."""
    read_at: float | None = None
    """Seconds since the epoch: a run that goes on has lasted until then. None: its newest leg has ended."""


@dataclass(frozen=True, kw_only=True)
class MembershipRow:
    """A change of membership, and the seconds that it has cost."""

    step: int
    what: str
    widths: str
    seconds: float | None
    """From the death, where it is known, to regrouping; without the first step after it."""
    loss_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """One run's part of the page."""

    name: str
    status: str
    commands: tuple[tuple[str, str], ...]
    """Captions and commands that repeat the run."""
    figures: dict[str, str]
    changes: tuple[MembershipRow, ...]
    evaluations: tuple[tuple[int, float], ...]
    checkpoints: tuple[CheckpointRow, ...]
    num_checkpoints: int
    notices: tuple[tuple[float, str], ...]
    num_notices: int
    plan: Plan | None
    bubbles: tuple[tuple[str, float], ...]
    """Shares of a step, planned and measured."""
    results: tuple[tuple[str, ...], ...]
    """Rows with the cells of RESULT_COLUMNS."""
    num_results: int
    result_damages: tuple[str, ...]
    """Why sets of results are left out."""
    environment: dict[str, str]
    config: Json


@dataclass(frozen=True, kw_only=True)
class PageData:
    """All that the page shows."""

    runs: tuple[RunPage, ...]
    charts: tuple[Chart, ...]
    result_charts: tuple[Chart, ...] = ()
    """What evaluations of checkpoints have found, a chart for each figure."""
    newest_results: tuple[tuple[str, ...], ...] = ()
    """A figure's name, and its newest value of each run."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    title: str
    unit: str = ""
    from_zero: bool = False
    is_staircase: bool = False
    only_if_it_changes: bool = False
    factor: float = 1.0
    """From a line's value to the chart's."""
    label: str = ""
    """Of its curve, beside the run's name."""
    planned: str = ""
    """The field of a line that has the planned value; "": it has none."""


SOURCES: dict[str, _Source] = {
    "grad_norm": _Source(title="Gradient norm", from_zero=True),
    "lr": _Source(title="Learning rate", from_zero=True),
    "sequence_length": _Source(
        title="Sequence length", unit="tokens", from_zero=True, is_staircase=True, only_if_it_changes=True
    ),
    "num_sequences": _Source(
        title="Batch", unit="sequences", from_zero=True, is_staircase=True, only_if_it_changes=True
    ),
    "tokens_per_s": _Source(title="Throughput", unit="tokens/s", from_zero=True),
    "step_s": _Source(title="Time of a step", unit="s", from_zero=True),
    "mfu": _Source(title="MFU", unit="share of peak FLOP/s", from_zero=True),
    "bubble": _Source(
        title="Pipeline bubble", unit="share of a step", from_zero=True, label="measured", planned="planned_bubble"
    ),
    "data_wait_s": _Source(title="Wait for data", unit="s a step", from_zero=True),
    "memory_bytes": _Source(title="Memory of the largest rank", unit="MB", from_zero=True, factor=1e-6),
    "param_norm": _Source(title="l2 norm of the weights"),
    "variance_norm": _Source(title="l1 norm of Adam's sqrt(v)"),
    "variance_max": _Source(title="Largest element of Adam's sqrt(v)"),
}


def make_page(runs: Sequence[RunFiles], *, dollars_per_hour: float | None = None) -> PageData:
    """The page of these runs. The price is that of all devices of a run together; None: what each run's own
    configuration says."""
    histories = [MetricsLog.of(run.lines) for run in runs]
    marks = tuple((row.step, row.what) for row in _changes(histories[0])) if len(runs) == 1 else ()
    names, results = [run.name for run in runs], [figures_by_name(run.results) for run in runs]
    return PageData(
        runs=tuple(_run_page(run, history, dollars_per_hour) for run, history in zip(runs, histories)),
        charts=tuple(_charts(runs, histories, marks)),
        result_charts=tuple(plan_result_charts(names, results, marks)),
        newest_results=tuple(newest_results(results)),
    )


# --- charts -----------------------------------------------------------------------------------------------------------


def _charts(
    runs: Sequence[RunFiles], histories: Sequence[MetricsLog], marks: tuple[tuple[int, str], ...]
) -> Iterator[Chart]:
    def series(points_of: Callable[[MetricsLog], Points], kind: str = "line", label: str = "") -> list[Series]:
        found = ((number, Curve.of(points_of(history))) for number, history in enumerate(histories))
        return [
            Series(run=number, label=_label(runs, number, label), curve=curve, kind=kind)
            for number, curve in found
            if curve.x
        ]

    names = [run.name for run in runs]
    entropies = [_number(run.summary.get("unigram_entropy")) for run in runs]
    clips = [_number(run.config.get("optimizer", {}).get("max_grad_norm")) for run in runs]
    evaluated = series(lambda history: [(each.step, each.loss) for each in history.evaluations], "dots", "evaluation")
    losses = series(lambda history: history.points("loss"), label="training")
    yield Chart(
        name="loss",
        title="Loss",
        unit="nats per token",
        series=(*losses, *evaluated, *series(loss_spikes, "spikes", "spikes")),
        references=reference_lines("unigram entropy", entropies, names),
        marks=marks,
    )
    ratios = series(lambda history: sorted(ratios_of(history).items()))
    if ratios:
        limit = (ReferenceLine(label=f"unstable above {UNSTABLE_RATIO:g}", value=UNSTABLE_RATIO),)
        title = "Loss ratio: loss / lowest loss before"
        yield Chart(name="loss_ratio", title=title, unit="", series=tuple(ratios), references=limit, marks=marks)
    for name, source in SOURCES.items():
        kind, scaled = "stairs" if source.is_staircase else "line", partial(_scaled, factor=source.factor)
        found = series(partial(scaled, name=name), kind, source.label)
        if found and name == "grad_norm":
            found += series(gradient_spikes, "spikes", "spikes")
        if found and source.planned:
            found += series(partial(scaled, name=source.planned), "planned", "planned")
        if not found or source.only_if_it_changes and all(len({*each.curve.mean}) < 2 for each in found):
            continue
        yield Chart(
            name=name,
            title=source.title,
            unit=source.unit,
            series=tuple(found),
            references=reference_lines("clipped above", clips, names) if name == "grad_norm" else (),
            marks=marks,
            from_zero=source.from_zero,
        )
    for number, history in enumerate(histories):
        if history.widths:
            yield _width_chart(number, runs[number].name if len(runs) > 1 else "", history)


def _scaled(history: MetricsLog, *, name: str, factor: float) -> Points:
    return [(step, factor * value) for step, value in history.points(name)]


def _label(runs: Sequence[RunFiles], number: int, what: str) -> str:
    return ", ".join(part for part in (runs[number].name if len(runs) > 1 or not what else "", what) if part)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _width_chart(number: int, name: str, history: MetricsLog) -> Chart:
    last_step = max(history.steps[-1]["step"], history.widths[-1][0])
    stages = []
    for stage in range(len(history.widths[0][1])):
        steps, widths = [step for step, _ in history.widths], [float(each[stage]) for _, each in history.widths]
        values = [*widths, widths[-1]]
        curve = Curve(x=[*steps, last_step], mean=values, low=values, high=values, steps_per_point=1)
        stages.append(Series(run=stage, label=f"stage {stage}", curve=curve, kind="stairs"))
    return Chart(
        name=f"widths-{number}",
        title=f"Replicas of each stage{f' of {name}' if name else ''}",
        unit="replicas",
        series=tuple(stages),
        from_zero=True,
        is_count=True,
    )


# --- one run ----------------------------------------------------------------------------------------------------------


def _run_page(run: RunFiles, history: MetricsLog, dollars_per_hour: float | None) -> RunPage:
    notices, checkpoints = messages_of(run.lines), checkpoints_of(run.lines, run.uploads)
    results = result_rows(figures_by_name(run.results))
    if dollars_per_hour is None:
        dollars_per_hour = run.config.get("monitor", {}).get("dollars_per_hour")
    return RunPage(
        name=run.name,
        status=_status(run, history),
        commands=repeat_commands(run.lines, run.environment, run.first_environment),
        figures=dict(_figures(run, history, dollars_per_hour)),
        changes=tuple(_changes(history)),
        evaluations=tuple((each.step, each.loss) for each in history.evaluations),
        checkpoints=tuple(checkpoints[-MAX_NOTICES:]),
        num_checkpoints=len(checkpoints),
        notices=tuple(notices[-MAX_NOTICES:]),
        num_notices=len(notices),
        plan=run.plan,
        bubbles=tuple(_bubbles(run, history)),
        results=tuple(results[-MAX_RESULTS:]),
        num_results=len(results),
        result_damages=tuple(run.result_damages),
        environment={name: _flat(value) for name, value in run.environment.items() if name not in COMMAND_FACTS},
        config=run.config,
    )


def _status(run: RunFiles, history: MetricsLog) -> str:
    total = run.config.get("run", {}).get("num_steps")
    at = f"{history.steps[-1]['step']:,}{f' of {total:,}' if total else ''} steps"
    if not run.summary:
        return f"not finished, {at}"
    code, message = run.summary.get("exit_code"), run.summary.get("message")
    return f"finished, {at}" if code == 0 else f"ended with code {code}, {at}{f': {message}' if message else ''}"


def _figures(run: RunFiles, history: MetricsLog, dollars_per_hour: float | None) -> Iterator[tuple[str, str]]:
    """Names and values of the table in which runs stand side by side."""
    last, stability, summary = history.steps[-1], analyse(history), run.summary
    account, now = RunHistory(run.lines), None if run.summary else run.read_at
    shares = account.figures(now)
    changes = list(_changes(history))
    events = [event for event in history.events if event["event"] == "membership"]
    yield "steps", f"{last['step']:,}"
    yield "tokens", f"{last.get('tokens', 0):,}"
    if (loss := summary.get("final_loss", last.get("loss"))) is not None:
        yield "final loss", f"{float(loss):.4f}"
    if best := history.best:
        yield "best evaluation", f"{best.loss:.4f} (step {best.step:,})"
    if (speed := summary.get("tokens_per_s", last.get("mean_tokens_per_s"))) is not None:
        yield "tokens/s", f"{float(speed):,.0f}"
    if (mfu := summary.get("mfu", last.get("mfu"))) is not None:
        yield "MFU", describe_mfu(mfu, summary.get("peak_flops_per_s"), summary.get("peak_source"))
    for label, share in _bubbles(run, history):
        yield f"bubble, {label}", f"{share:.1%}"
    yield "steps above 1.2 x lowest loss", f"{stability.loss_ratio.num_unstable:,}"
    yield "gradient spikes", f"{sum(stability.spikes.histogram.values()):,}"
    yield "workers lost", f"{sum(len(event['who']) for event in events):,}"
    yield "workers joined", f"{sum(len(event['joined']) for event in events):,}"
    yield "seconds that changes have cost", f"{sum(row.seconds or 0.0 for row in changes):.2f}"
    for key, label in (("restarts", "restarts"), ("lost_steps", "steps lost by restarts")):
        yield label, f"{shares.get(key, 0):,}"
    yield from checkpoint_figures(checkpoints_of(run.lines, run.uploads))
    if shares:
        if (num_legs := account.paid_time.num_legs) > 1:
            yield "legs (the first one and resumes)", f"{num_legs:,}"
        yield "wall-clock time", f"{shares['wall_s']:,.1f} s"
        yield "goodput (productive share of the time)", f"{shares['uptime']:.1%}"
        if dollars_per_hour is not None:
            yield from dollar_figures(run.lines, account, now=now, dollars_per_hour=dollars_per_hour)
    for key in ("layout", "parameters"):
        if (value := summary.get(key)) is not None:
            yield key, f"{value:,}" if isinstance(value, int) else str(value)


def _bubbles(run: RunFiles, history: MetricsLog) -> Iterator[tuple[str, float]]:
    for key, label in (("bubble", "measured"), ("planned_bubble", "planned")):
        if (value := run.summary.get(key, history.steps[-1].get(key))) is not None:
            yield label, float(value)


def _changes(history: MetricsLog) -> Iterator[MembershipRow]:
    ratios = ratios_of(history)
    for event in history.events:
        if event["event"] == "membership":
            yield MembershipRow(
                step=event["step"],
                what=describe_change(event),
                widths=f"{format_widths(event.get('widths_before'))} to {format_widths(event.get('widths'))}",
                seconds=seconds_of_change(event),
                loss_ratio=ratios.get(event["step"]),
            )


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_flat(each)}" for name, each in value.items())
    return str(value)
