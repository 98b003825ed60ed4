"""The strategies against failures that a scenario compares, and their estimates. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from parallel3d.goodput.closed_forms import best_interval
from parallel3d.goodput.elastic_strategy import ElasticStrategy
from parallel3d.goodput.failure_trace import SECONDS_PER_HOUR, FailureTrace, draw_trace
from parallel3d.goodput.outcome import Estimate, RestartCosts
from parallel3d.goodput.restart_strategy import RestartStrategy
from parallel3d.goodput.scenario import Scenario

Strategy = RestartStrategy | ElasticStrategy
HOURS_PER_DAY = 24


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """All strategies at one size and one failure rate."""

    num_devices: int
    multiple: float
    failures_per_hour: float
    estimates: dict[str, Estimate]
    """By the strategy's name, worst assumptions first."""


def compare_strategies(scenario: Scenario, speeds: Sequence[float] = ()) -> Iterator[ComparisonRow]:
    """Yields a row for each size and multiple; every strategy meets the same failures.

    `speeds` are throughputs of a rerouted run with 0, 1, 2, ... lost replicas in the worst stage.
    """
    for num_replicas in scenario.cluster.num_replicas:
        for multiple in scenario.failures.multiples:
            rate = scenario.failures_per_hour(num_replicas, multiple)
            traces = [_draw(scenario, num_replicas, rate, run) for run in range(scenario.num_runs)]
            strategies = build_strategies(scenario, num_replicas=num_replicas, failures_per_hour=rate, speeds=speeds)
            yield ComparisonRow(
                num_devices=scenario.cluster.num_devices(num_replicas),
                multiple=multiple,
                failures_per_hour=rate,
                estimates={each.name: Estimate.of([each.run(trace) for trace in traces]) for each in strategies},
            )


def build_strategies(
    scenario: Scenario, *, num_replicas: int, failures_per_hour: float, speeds: Sequence[float] = ()
) -> list[Strategy]:
    """Returns the strategies of a scenario, for one size and failure rate."""
    restarts, recoveries = scenario.restarts, scenario.recoveries
    given = RestartCosts(interval_s=restarts.interval_s, save_s=restarts.save_s, restart_s=restarts.restart_s)
    built: list[Strategy] = []
    if restarts.human_s:
        by_hand = replace(given, restart_s=given.restart_s + restarts.human_s)
        built.append(RestartStrategy(name="restart by hand", restart=by_hand))
    built.append(RestartStrategy(name="restart", restart=given))
    if restarts.save_s:
        best_s = SECONDS_PER_HOUR * best_interval(rate=failures_per_hour, save=restarts.save_s / SECONDS_PER_HOUR)
        built.append(
            RestartStrategy(name="restart, best interval", restart=replace(given, interval_s=max(1.0, best_s)))
        )

    lost_stage = replace(given, interval_s=recoveries.save_interval_s)
    units: list[tuple[str, Literal["pipeline", "stage"], float | None]] = [
        ("rank drop", "pipeline", None),
        ("replica drop", "pipeline", recoveries.replace_s),
        ("reroute", "stage", None),
        *(("reroute", "stage", seconds) for seconds in recoveries.rejoin_s),
    ]
    return built + [
        ElasticStrategy(
            name=name if returns_after_s is None else f"{name}, back after {returns_after_s:g} s",
            unit=unit,
            num_stages=scenario.cluster.pp_size,
            num_replicas=num_replicas,
            pause_s=recoveries.pause_s + recoveries.step_s / 2,
            returns_after_s=returns_after_s,
            repair_interval_s=recoveries.repair_interval_s,
            join_pause_s=recoveries.join_pause_s,
            speeds=tuple(speeds) if unit == "stage" else (),
            restart=lost_stage,
        )
        for name, unit, returns_after_s in units
    ]


def _draw(scenario: Scenario, num_replicas: int, failures_per_hour: float, run: int) -> FailureTrace:
    return draw_trace(
        failures_per_hour=failures_per_hour,
        num_replicas=scenario.cluster.pp_size * num_replicas,
        duration_s=round(scenario.days * HOURS_PER_DAY * SECONDS_PER_HOUR),
        seed=(scenario.seed, run),
    )
