"""Estimates how much of the time training keeps under failures: `python launch/goodput.py [section.field=value ...]`.

Compares restarts from checkpoints with training that goes on (ranks or replicas dropped, work rerouted, replicas that
come back) on the same simulated failures. `--scenario FILE` describes another cluster in JSON; `--config FILE` takes
the layout of a run, its planned throughput after losses, and the seconds that it has measured if FILE is in its folder;
`--paper` compares published numbers with what follows from their assumptions. `--chart FILE` draws the comparison.
docs/goodput.md has the assumptions. Exit codes: 0 done, 2 invalid input.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from parallel3d.commands.parsers import parse
from parallel3d.config.derived import stage_replicas
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.goodput.failure_trace import SECONDS_PER_HOUR
from parallel3d.goodput.paper_numbers import PaperNumber, UptimeAssumptions, formulas, simulations, uptimes
from parallel3d.goodput.scenario import Scenario, load_scenario, parse_scenario
from parallel3d.goodput.strategies import ComparisonRow, compare_strategies
from parallel3d.monitor.history import MetricsLog
from parallel3d.monitor.run_folder import METRICS, read_metrics
from parallel3d.pipeline.planner import plan_pipeline
from parallel3d.trainer.plans import build_grid, plan_schedule

MAX_PLANNED_LOSSES = 3
"""Lost replicas of one stage up to which the planner is asked."""


def main(arguments: list[str]) -> int:
    options = parse("goodput", arguments)
    try:
        if options.paper:
            print("\n".join(describe_paper()))
            return 0
        scenario, speeds = read_input(options)
        rows = list(compare_strategies(scenario, speeds))
        lines = [json.dumps(as_dict(scenario, rows), indent=2)] if options.json else describe(scenario, rows, speeds)
        print("\n".join(lines))
        if options.chart is not None:
            draw(options.chart, rows, scenario.name)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def read_input(options: argparse.Namespace) -> tuple[Scenario, tuple[float, ...]]:
    """The scenario; and the planned throughputs of a run after losses, unless an override has changed its layout."""
    if options.config is None:
        return load_scenario(options.scenario, options.overrides), ()
    config = resolve(load_config(options.config), config_path=options.config)
    raw = scenario_of_run(config, Path(options.config))
    cluster = copy.deepcopy(raw["cluster"])
    scenario = parse_scenario(raw, options.overrides)
    return scenario, planned_speeds(config) if scenario.cluster.model_dump() == cluster else ()


# --- a run ------------------------------------------------------------------------------------------------------------


def scenario_of_run(config: Config, path: Path) -> dict[str, Any]:
    """The scenario of a run as JSON: its layout, and what its folder's metrics have measured."""
    replicas = stage_replicas(config)
    if len(set(replicas)) > 1:
        raise UserError(f"{path}: stages have {list(replicas)} replicas; the estimate needs equally many of each stage")
    raw: dict[str, Any] = {
        "name": f"{path}",
        "cluster": {
            "tp_size": config.parallel.tp_size,
            "pp_size": len(replicas),
            "num_replicas": [replicas[0]],
        },
        "failures": {"multiples": [1]},
        "restarts": {},
        "recoveries": {},
    }
    if not (path.parent / METRICS).is_file():
        return raw
    try:
        history = MetricsLog.of(read_metrics(path.parent / METRICS))
    except (OSError, ValueError) as error:
        raise UserError(f"{path.parent / METRICS} can't be read: {error}") from None
    if steps_s := [line["step_s"] for line in history.steps if line.get("step_s")]:
        raw["recoveries"]["step_s"] = step_s = median(steps_s)
        if config.checkpoint.every is not None:
            raw["restarts"]["interval_s"] = config.checkpoint.every * step_s
    for field, has_joined in (("pause_s", False), ("join_pause_s", True)):
        changes = [event for event in history.events if event["event"] == "membership"]
        pauses = [pause_of(event) for event in changes if bool(event.get("joined")) is has_joined]
        if pauses:
            raw["recoveries"][field] = median(pauses)
    return raw


def pause_of(event: dict[str, Any]) -> float:
    """Seconds of a change of membership, from its cause until training goes on."""
    return sum(event.get(name) or 0.0 for name in ("detect_s", "agree_s", "repair_s", "regroup_s"))


def planned_speeds(config: Config) -> tuple[float, ...]:
    """Throughput with 0, 1, 2, ... lost replicas of one stage, as the planner finds it; the worst stage's."""
    whole = build_grid(config)
    count = config.batch.num_micro_batches
    assert count is not None
    width, speeds = len(whole.stages[0]), [1.0]
    for num_lost in range(1, min(MAX_PLANNED_LOSSES, width - 1) + 1):
        kept = 1.0
        for stage in {0, whole.pp_size // 2, whole.pp_size - 1}:
            lost = [rank for number in range(num_lost) for rank in whole.tp_ranks((stage, number))]
            plan = plan_schedule(config, whole.without(lost)[0], count)
            request = replace(plan.request, replicas=whole.replicas, routing="reroute")
            request = replace(request, split_backward=False, extra_in_flight=0)
            kept = min(kept, plan_pipeline(request).makespan / plan.makespan)
        speeds.append(kept)
    return tuple(speeds)


# --- text -------------------------------------------------------------------------------------------------------------


def describe(scenario: Scenario, rows: Sequence[ComparisonRow], speeds: Sequence[float]) -> Iterator[str]:
    """The tables of all sizes, and what they rest on."""
    cluster = scenario.cluster
    stages = "1 stage" if cluster.pp_size == 1 else f"{cluster.pp_size} stages"
    devices = "1 device" if cluster.tp_size == 1 else f"{cluster.tp_size} devices"
    yield f"{scenario.name}: {stages}, replicas of {devices}"
    if len(speeds) > 1:
        kept = ", ".join(f"{lost}: {100 * speed:.1f} %" for lost, speed in enumerate(speeds) if lost)
        yield f"planned throughput by lost replicas of one stage: {kept}"
    for size in dict.fromkeys(row.num_devices for row in rows):
        yield ""
        yield from describe_size([row for row in rows if row.num_devices == size])
    error = max(estimate.standard_error for row in rows for estimate in row.estimates.values())
    yield ""
    if scenario.num_runs > 1:
        yield (
            f"means of {scenario.num_runs} runs of {scenario.days:g} days, "
            f"standard errors up to {100 * error:.2g} points"
        )
    yield "a second more of pause costs (points): " + ", ".join(
        f"{100 * row.failures_per_hour / SECONDS_PER_HOUR:.2g}" for row in rows[: len(scenario.failures.multiples)]
    )
    if len(rows) == 1:
        yield ""
        yield from describe_loss(rows[0])


def describe_size(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """A table: strategies by multiples of the failure rate."""
    names = list(rows[0].estimates)
    width = max(map(len, names))
    yield f"{rows[0].num_devices:,} devices: % of the fault-free throughput"
    yield f"{'failure rate':<{width}}" + "".join(f"{f'x {row.multiple:g}':>9}" for row in rows)
    yield f"{'failures an hour':<{width}}" + "".join(f"{row.failures_per_hour:>9.3g}" for row in rows)
    for name in names:
        yield f"{name:<{width}}" + "".join(f"{100 * row.estimates[name].goodput:>9.2f}" for row in rows)


def describe_loss(row: ComparisonRow) -> Iterator[str]:
    """What one cluster loses, in words."""
    yield f"With a failure every {1 / row.failures_per_hour:,.3g} hours on {row.num_devices:,} devices you lose"
    for name, estimate in row.estimates.items():
        parts = [f"{100 * estimate.paused:.2f} waiting", f"{100 * estimate.repeated:.2f} repeated"]
        if not name.startswith("restart") and estimate.num_restarts:
            parts.append(f"{estimate.num_restarts:.2g} restarts a run, as a whole stage was lost")
        yield f"  {100 * (1 - estimate.goodput):6.2f} %  {name} ({', '.join(parts)})"
    yield "The rest of a loss are checkpoints, and time in which fewer devices train."


def describe_paper() -> Iterator[str]:
    """FlexiTrain's and HLAT's numbers."""
    sections = {
        "FlexiTrain, formulas": formulas(),
        "FlexiTrain, simulations of a month (means of 400)": simulations(),
        "HLAT, uptimes": uptimes(UptimeAssumptions()),
    }
    for title, numbers in sections.items():
        yield f"{title:<82} {'computed':>9} {'published':>9}  follows"
        yield from map(describe_number, numbers)
        yield ""
    yield "docs/goodput.md says what does not follow."


def describe_number(number: PaperNumber) -> str:
    published = "" if number.published is None else f"{number.published:g}"
    follows = {True: "yes", False: "NO", None: ""}[number.follows]
    note = f"({number.note})" if number.note else ""
    return f"  {number.what:<80} {number.computed:>9.4g} {published:>9}  {follows:<4}{note}".rstrip()


def as_dict(scenario: Scenario, rows: Sequence[ComparisonRow]) -> dict[str, Any]:
    return {"scenario": scenario.model_dump(), "rows": [asdict(row) for row in rows]}


def draw(path: Path, rows: Sequence[ComparisonRow], title: str) -> None:
    """Draws the chart. Raises UserError if the file can't be written."""
    from parallel3d.goodput.goodput_chart import draw_comparison  # matplotlib takes most of a second to import

    try:
        draw_comparison(path, rows, title=title)
    except (OSError, ValueError) as error:  # ValueError: a suffix that names no picture format
        raise UserError(f"--chart {path}: the picture can't be written: {error}") from error
    print(f"wrote {path}", file=sys.stderr)
