"""Reports on a run, finished or not: `python launch/report.py RUN_FOLDER [--against OTHER] [--every S]`.

Prints how stable the run was (loss ratio, spikes of the gradient norm, correlation of the loss ratio with Adam's
sqrt(v)), its best evaluation, the effect of changes of membership, how often to evaluate, what evaluations of its
checkpoints have found, and which checkpoints are in its remote store; and redraws its charts.
`--against` compares it with another run: tokens and time to the other's best loss, and both losses at equal tokens.
`--html` writes a page instead (report_page).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from parallel3d.commands.parsers import parse
from parallel3d.errors import UserError
from parallel3d.evaluation.result_figures import ResultHistory, describe_figures
from parallel3d.evaluation.result_history import read_result_history
from parallel3d.evaluation.saved_results import starts_of
from parallel3d.monitor.correlation import Correlation
from parallel3d.monitor.evaluation_interval import plan_evaluations
from parallel3d.monitor.history import MetricsLog, ReferenceComparison, analyse, compare_to_reference
from parallel3d.monitor.run_folder import CONFIG, METRICS, SUMMARY, read_metrics
from parallel3d.monitor.upload_history import UPLOADS, UploadHistory
from parallel3d.report_page.page_file import write_page, write_page_until_finished

PLANNED_SHARE = 0.05
"""Share of the training time that the advised evaluations may take."""
MAX_CHANGES = 10
"""Changes of membership that are listed."""


def main(arguments: list[str]) -> int:
    options = parse("report", arguments)
    try:
        check_options(options)
        if options.html:
            print(f"written to {write_html(options)}")
            return 0
        if options.every is not None:
            redraw_until_finished(options.folder, options.every)
        history = read_history(options.folder)
        other = read_history(options.against) if options.against else None
        charts = [] if options.no_charts else draw(options.folder, history)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    win = compare_to_reference(history, other) if other else None
    uploads = read_uploads(options.folder)
    results = read_result_history(options.folder, starts_of(history.events), partial(print, file=sys.stderr))
    if options.json:
        newest = {name: rows[-1] for name, rows in results.items() if rows}
        found = report_as_dict(history, win) | {"evaluations": newest, "uploads": asdict(uploads) if uploads else None}
        print(json.dumps(found, indent=2))
        return 0
    config = read_json(options.folder / CONFIG)
    lines = [*describe(history, config), *describe_results(results), *describe_uploads(uploads)]
    lines += describe_win(win, options.against)
    print("\n".join([*lines, *([f"drawn: {', '.join(charts)}"] if charts else [])]))
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Raises UserError for options that have no effect."""
    of_page = {"OTHER": options.others, "--out": options.out, "--dollars-per-hour": options.dollars_per_hour}
    of_text = {"--against": options.against, "--json": options.json, "--no-charts": options.no_charts}
    if given := [name for name, value in (of_text if options.html else of_page).items() if value]:
        raise UserError(f"{given[0]} has no effect {'with' if options.html else 'without'} --html")
    if options.dollars_per_hour is not None and not 0 < options.dollars_per_hour < inf:
        raise UserError(f"--dollars-per-hour {options.dollars_per_hour:g}: must be more than 0, and finite")


def write_html(options: argparse.Namespace) -> Path:
    folders = [options.folder, *options.others]
    price = options.dollars_per_hour
    if options.every is None:
        return write_page(folders, out=options.out, dollars_per_hour=price)
    return write_page_until_finished(folders, options.every, out=options.out, dollars_per_hour=price)


def read_history(folder: Path) -> MetricsLog:
    """The metrics of a run. Raises UserError when the folder has none."""
    try:
        history = MetricsLog.of(read_metrics(folder / METRICS))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{folder} is not the folder of a run: can't read {METRICS} ({reason})") from None
    if not history.steps:
        raise UserError(f"{folder}: {METRICS} holds no step yet")
    return history


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} without one, as for the summary of a run that is still going on."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def read_uploads(folder: Path) -> UploadHistory | None:
    """The history of uploads to the run's remote store; None without one."""
    try:
        return UploadHistory.of(read_metrics(folder / UPLOADS))
    except (OSError, ValueError):
        return None


def draw(folder: Path, history: MetricsLog) -> list[str]:
    """Draws the charts into the folder; returns their names."""
    from parallel3d.monitor.charts import draw_all  # matplotlib takes most of a second to import

    entropy = read_json(folder / SUMMARY).get("unigram_entropy")
    try:
        return draw_all(
            folder, history, title=folder.resolve().name, config=read_json(folder / CONFIG), entropy=entropy
        )
    except OSError as error:
        raise UserError(f"can't draw into {folder} ({error.strerror}): use --no-charts") from None


def redraw_until_finished(folder: Path, every_s: float) -> None:
    """Draws the charts of a running run, from this process, until its summary appears."""
    while not (folder / SUMMARY).exists():
        draw(folder, read_history(folder))
        time.sleep(every_s)


def report_as_dict(history: MetricsLog, win: ReferenceComparison | None) -> dict[str, Any]:
    """All that the text says, as one object."""
    stability, best = analyse(history), history.best
    return {
        "steps": history.steps[-1]["step"],
        "tokens": history.steps[-1].get("tokens"),
        "best": asdict(best) if best else None,
        "loss_ratio": asdict(stability.loss_ratio) | {"largest_at": stability.largest_at},
        "grad_spikes": {str(length): count for length, count in stability.spikes.histogram.items()},
        "loss_ratio_with_variance_norm": _as_dict(stability.with_variance_norm),
        "loss_ratio_with_variance_max": _as_dict(stability.with_variance_max),
        "membership_changes": [asdict(change) for change in stability.changes],
        "win": asdict(win) | {"tokens_saved": win.tokens_saved, "time_saved": win.time_saved} if win else None,
    }


def describe(history: MetricsLog, config: dict[str, Any]) -> Iterator[str]:
    """The lines about one run."""
    stability, last = analyse(history), history.steps[-1]
    ratio, spikes = stability.loss_ratio, stability.spikes
    yield f"steps                        {last['step']:,} ({last.get('tokens', 0):,} tokens)"
    if best := history.best:
        yield f"best evaluation              {best.loss:.4f} nats per token, step {best.step} of {last['step']}"
    yield f"lowest training loss         {ratio.lowest:.4f}"
    yield f"steps with loss ratio > 1.2  {ratio.num_unstable:,} ({ratio.unstable_share:.2%})"
    if ratio.largest is not None:
        yield f"largest loss ratio           {ratio.largest:.3f}, step {stability.largest_at}"
    for name, found in (("norm", stability.with_variance_norm), ("max", stability.with_variance_max)):
        if found is not None:
            yield f"loss ratio, variance {name:<6}  {_describe_correlation(found)}"
    counts = spikes.histogram
    share = "" if spikes.single_step_share is None else f"; {spikes.single_step_share:.0%} last one step"
    listed = "  ".join(f"{length}: {count}" for length, count in counts.items()) or "none"
    yield f"gradient spikes by length    {listed}{share}"
    if (clipped := last.get("fraction_clipped")) is not None:
        yield f"updates that were clipped    {clipped:.1%}"
    for change in stability.changes[:MAX_CHANGES]:
        ratio_there = "" if change.loss_ratio is None else f", loss ratio {change.loss_ratio:.3f}"
        spike = ", within a gradient spike" if change.is_spike else ", no gradient spike"
        yield f"change of membership         step {change.step}{ratio_there}{spike}"
    if len(stability.changes) > MAX_CHANGES:
        yield f"                             ... and {len(stability.changes) - MAX_CHANGES} more"
    yield from _describe_plan(history, config)


def _describe_correlation(found: Correlation) -> str:
    return f"Pearson r {found.r:+.2f}, p {found.p:.2g} (t {found.t:.1f}, {found.num_pairs:,} steps)"


def _describe_plan(history: MetricsLog, config: dict[str, Any]) -> Iterator[str]:
    """The advised evaluation settings, from the measured times."""
    run = config.get("run", {})
    seconds = [event["seconds"] for event in history.events if event.get("seconds") and event["event"] == "evaluation"]
    steps_s = [line["step_s"] for line in history.steps if line.get("step_s")]
    if seconds and steps_s and run.get("num_steps") and run.get("evaluate_batches"):
        batch_s = median(seconds) / run["evaluate_batches"]
        plan = plan_evaluations(
            num_steps=run["num_steps"], step_s=median(steps_s), batch_s=batch_s, share=PLANNED_SHARE
        )
        if plan is None:
            reason = f"a batch of {batch_s:.2g} s is over {PLANNED_SHARE:.0%} of all steps"
            yield f"advised evaluations          none: {reason}"
            return
        yield (
            f"advised evaluations          {plan.num_evaluations} in {plan.share:.1%} more time:"
            f" run.evaluate_every={plan.every} run.evaluate_batches={plan.num_batches}"
            f" ({plan.evaluation_s:.2g} s each; a batch takes {batch_s:.2g} s)"
        )


def describe_results(results: ResultHistory) -> Iterator[str]:
    """The lines about evaluations of checkpoints: the newest of each set, a line for each text or task."""
    for name, rows in results.items():
        label = f"evaluated on {name}"
        for group, figures in rows[-1]["results"].items() if rows else ():
            yield f"{label:<28} step {rows[-1]['step']:,}, {group}: {describe_figures(figures)}"
            label = ""


def describe_uploads(uploads: UploadHistory | None) -> Iterator[str]:
    """The lines about the remote store."""
    if uploads is None:
        return
    newest = "" if uploads.newest_step is None else f", the newest of step {uploads.newest_step:,}"
    sent = f"{uploads.num_uploaded:,} ({uploads.num_bytes / 1e6:,.1f} MB){newest}"
    yield f"checkpoints uploaded         {sent}; {uploads.num_retries} retries, {uploads.num_failures} failures"
    if uploads.behind:
        yield f"checkpoints not uploaded     {', '.join(map(str, uploads.behind))}: {uploads.problem}"


def describe_win(win: ReferenceComparison | None, other: Path | None) -> Iterator[str]:
    """The lines about the comparison with another run."""
    if other is None:
        return
    if win is None:
        yield f"against {other}: one of the two has no evaluation"
        return
    best, reached = win.reference, win.reached
    yield f"against {other}:"
    yield f"  its best evaluation is {best.loss:.4f} after {best.tokens:,.0f} tokens and {best.seconds:,.1f} s"
    if reached is None:
        yield "  this run does not reach it"
    else:
        saved = [
            f"{share:+.0%} {what}"
            for share, what in ((win.tokens_saved, "of the tokens"), (win.time_saved, "of the time"))
            if share is not None
        ]
        at = f"step {reached.step}, {reached.tokens:,.0f} tokens, {reached.seconds:,.1f} s"
        yield f"  this run reaches it at {at}: saved {', '.join(saved)}"
    if win.loss is None or win.reference_loss is None:
        yield f"  at {win.equal_tokens:,.0f} tokens: one of the two has no evaluation yet"
    else:
        yield f"  at {win.equal_tokens:,.0f} tokens: {win.loss:.4f} against {win.reference_loss:.4f}"


def _as_dict(found: Correlation | None) -> dict[str, Any] | None:
    return asdict(found) if found else None
