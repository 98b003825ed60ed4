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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from parallel3d.commands.parsers import parse
from parallel3d.config.derived import save_intervals, stage_replicas
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.goodput.failure_trace import SECONDS_PER_HOUR
from parallel3d.goodput.paper_numbers import PaperNumber, UptimeAssumptions, formulas, simulations, uptimes
from parallel3d.goodput.scenario import Scenario, load_scenario, parse_scenario
from parallel3d.goodput.strategies import ComparisonRow, compare_strategies
from parallel3d.monitor.history import MetricsLog
from parallel3d.monitor.run_costs import restart_times_s, save_costs
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
        scenario, speeds, measured = read_input(options)
        rows = list(compare_strategies(scenario, speeds))
        if options.json:
            print(json.dumps(as_dict(scenario, rows, measured), indent=2))
        else:
            print("\n".join([*describe(scenario, rows, speeds), *describe_sources(scenario, measured)]))
        if options.chart is not None:
            draw(options.chart, rows, scenario.name)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def read_input(options: argparse.Namespace) -> tuple[Scenario, tuple[float, ...], dict[str, str]]:
    """The scenario; the planned throughputs of a run after losses, unless an override has changed its layout; and what
    is measured, with its source."""
    if options.config is None:
        return load_scenario(options.scenario, options.overrides), (), {}
    config = resolve(load_config(options.config), config_path=options.config)
    path = Path(options.config)
    measured = measured_seconds(config, path)
    raw = scenario_of_run(config, path, measured)
    cluster = copy.deepcopy(raw["cluster"])
    scenario = parse_scenario(raw, options.overrides)
    kept = {field: each.source for field, each in measured.items() if _value_of(scenario, field) == each.seconds}
    return scenario, planned_speeds(config) if scenario.cluster.model_dump() == cluster else (), kept


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeasuredSeconds:
    """A number of a scenario that a run has measured."""

    seconds: float
    source: str
    """In words: of what it is the median."""


def scenario_of_run(config: Config, path: Path, measured: Mapping[str, MeasuredSeconds]) -> dict[str, Any]:
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
    for field, each in measured.items():
        section, _, name = field.partition(".")
        raw[section][name] = each.seconds
    return raw


def measured_seconds(config: Config, path: Path) -> dict[str, MeasuredSeconds]:
    """Fields of a scenario that the metrics beside a run's configuration have measured; all strategies save at the
    run's own interval, and pay the same for it."""
    if not (path.parent / METRICS).is_file():
        return {}
    try:
        lines = list(read_metrics(path.parent / METRICS))
        return {field: each for field, each in _measure(config, lines)}
    except (OSError, ValueError) as error:
        raise UserError(f"{path.parent / METRICS} can't be read: {error}") from None


def _measure(config: Config, lines: Sequence[dict[str, Any]]) -> Iterator[tuple[str, MeasuredSeconds]]:
    history = MetricsLog.of(lines)
    if steps_s := [line["step_s"] for line in history.steps if line.get("step_s")]:
        step_s = median(steps_s)
        yield "recoveries.step_s", MeasuredSeconds(seconds=step_s, source=_count(steps_s, "step"))
        if intervals := save_intervals(config.checkpoint):
            source = f"{min(intervals):,} steps of the configuration"
            for field in ("restarts.interval_s", "recoveries.save_interval_s"):
                yield field, MeasuredSeconds(seconds=min(intervals) * step_s, source=source)
    if costs := save_costs(lines):
        slower = "unknown" if costs.slowdown_s is None else f"{max(0.0, costs.slowdown_s):.3g} s"
        source = f"{costs.num_saves:,} {'save' if costs.num_saves == 1 else 'saves'}: {costs.snapshot_s:.3g} s between"
        source += f" two steps, {slower} by slower steps while it is written"
        yield "restarts.save_s", MeasuredSeconds(seconds=costs.seconds, source=source)
    if times_s := list(restart_times_s(lines)):
        yield "restarts.restart_s", MeasuredSeconds(seconds=median(times_s), source=_count(times_s, "restart"))
    changes = [event for event in history.events if event["event"] == "membership"]
    for field, what, has_joined in (("pause_s", "loss", False), ("join_pause_s", "return", True)):
        pauses = [pause_of(event) for event in changes if bool(event.get("joined")) is has_joined]
        if pauses:
            yield f"recoveries.{field}", MeasuredSeconds(seconds=median(pauses), source=_count(pauses, what))


def _count(times_s: Sequence[float], what: str) -> str:
    plural = what + ("es" if what.endswith("s") else "s")
    return f"1 {what}" if len(times_s) == 1 else f"{len(times_s):,} {plural}"


def _value_of(scenario: Scenario, field: str) -> Any:
    if field == "failures.per_device_hour":
        return scenario.failures.base_rate
    section, _, name = field.partition(".")
    return getattr(getattr(scenario, section), name)


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


def describe_sources(scenario: Scenario, measured: Mapping[str, str]) -> Iterator[str]:
    """Says which numbers of the scenario are measured, and which ones only assumed, as neither the run nor the user has
    given them."""
    if measured:
        yield ""
    for field, source in measured.items():
        yield f"measured: {field} {_value_of(scenario, field):.4g} s ({source})"
    if names := assumed_fields(scenario):
        yield ""
        yield "assumed: " + ", ".join(f"{field} {_in_words(_value_of(scenario, field))}" for field in names)


def assumed_fields(scenario: Scenario) -> list[str]:
    """Fields of seconds and of the failure rate that have their defaults because nothing else was said."""
    failures = scenario.failures
    rate = ["failures.per_device_hour"] if failures.observed is None and failures.per_device_hour is None else []
    seconds = [
        f"{section}.{name}"
        for section, costs in (("restarts", scenario.restarts), ("recoveries", scenario.recoveries))
        for name in type(costs).model_fields
        if name not in costs.model_fields_set and getattr(costs, name)
    ]
    return rate + seconds


def _in_words(value: Any) -> str:
    return " and ".join(f"{each:,g}" for each in value) if isinstance(value, list) else f"{value:,g}"


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


def as_dict(scenario: Scenario, rows: Sequence[ComparisonRow], measured: Mapping[str, str]) -> dict[str, Any]:
    return {
        "scenario": scenario.model_dump(),
        "measured": dict(measured),
        "assumed": assumed_fields(scenario),
        "rows": [asdict(row) for row in rows],
    }


def draw(path: Path, rows: Sequence[ComparisonRow], title: str) -> None:
    """Draws the chart. Raises UserError if the file can't be written."""
    from parallel3d.goodput.goodput_chart import draw_comparison  # matplotlib takes most of a second to import

    try:
        draw_comparison(path, rows, title=title)
    except (OSError, ValueError) as error:  # ValueError: a suffix that names no picture format
        raise UserError(f"--chart {path}: the picture can't be written: {error}") from error
    print(f"wrote {path}", file=sys.stderr)
