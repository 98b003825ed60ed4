"""Each cell of the comparison at 98,304 devices, simulated, against what the formulas say of it."""

from __future__ import annotations

from math import exp
from pathlib import Path
from statistics import fmean

import pytest

from parallel3d.goodput.closed_forms import (
    best_interval,
    failure_probability,
    lost_until_return,
    mean_most_lost,
    restart_throughput,
)
from parallel3d.goodput.scenario import Scenario, load_scenario
from parallel3d.goodput.strategies import compare_strategies

SIZES = Path(__file__).resolve().parents[1] / "configs/goodput/sizes.json"
HOUR_S = 3600
NUM_MOMENTS = 100
"""Of a repair interval, at which a mean over it is evaluated."""
DAYS = {1: 6.0, 10: 4.0, 50: 2.0, 200: 1.0}
"""By multiple of the rate: some 10,000 failures at most."""


def elastic_goodput(scenario: Scenario, rate: float, *, num_groups: int, out_s: float | None) -> float:
    """Of a strategy in which units of this many groups fail and return independently, after `out_s` or, None, at the
    next repair.

    Training goes on at a moment if nothing has failed (or returned) within the last pause: e^(-rate pause). What is out
    does not fail again.
    """
    recoveries, (replicas,) = scenario.recoveries, scenario.cluster.num_replicas
    pause_h = (recoveries.pause_s + recoveries.step_s / 2) / HOUR_S
    join_h, repair_h = recoveries.join_pause_s / HOUR_S, recoveries.repair_interval_s / HOUR_S
    unit_rate = rate / replicas / num_groups
    if out_s is None:
        moments = [repair_h * (moment + 0.5) / NUM_MOMENTS for moment in range(NUM_MOMENTS)]
        shares_out = [failure_probability(rate=unit_rate, interval=moment) for moment in moments]
        joining = 1 - join_h / repair_h
    else:
        shares_out = [lost_until_return(unit_rate=unit_rate, out=out_s / HOUR_S)]
        joining = exp(-rate * (1 - shares_out[0]) * join_h)

    def speed(out: float) -> float:
        lost = mean_most_lost(num_groups=num_groups, members=replicas, probability=out)
        return (1 - lost / replicas) * exp(-rate * (1 - out) * pause_h)

    save_s = scenario.restarts.save_s
    saving = save_s / (recoveries.save_interval_s + save_s)
    return fmean(map(speed, shares_out)) * joining * (1 - saving)


def formulas(scenario: Scenario, rate: float) -> dict[str, float]:
    """Goodput by strategy at so many failures an hour, if losses of whole stages are too rare to matter."""
    restarts, stages = scenario.restarts, scenario.cluster.pp_size
    save_h, restart_h = restarts.save_s / HOUR_S, restarts.restart_s / HOUR_S
    intervals_h = {
        "restart": restarts.interval_s / HOUR_S,
        "restart, best interval": best_interval(rate=rate, save=save_h),
    }
    restarted = {
        name: restart_throughput(rate=rate, interval=interval, restart=restart_h, save=save_h, restart_can_fail=True)
        for name, interval in intervals_h.items()
    }
    elastic = {
        "rank drop": (1, None),
        "replica drop, back after 1200 s": (1, 1200.0),
        "reroute": (stages, None),
        "reroute, back after 40 s": (stages, 40.0),
        "reroute, back after 1200 s": (stages, 1200.0),
    }
    return restarted | {
        name: elastic_goodput(scenario, rate, num_groups=num_groups, out_s=out_s)
        for name, (num_groups, out_s) in elastic.items()
    }


@pytest.mark.parametrize("multiple", DAYS)
def test_all_cells_at_98304_devices(multiple: int):
    """Three runs. Besides their scatter, 0.1 points: runs begin whole, and the last pause goes on after the end."""
    overrides = ["cluster.num_replicas=[768]", f"failures.multiples=[{multiple}]"]
    scenario = load_scenario(SIZES, [*overrides, "num_runs=3", f"days={DAYS[multiple]}"])
    (row,) = compare_strategies(scenario)
    assert row.num_devices == 98_304 and row.failures_per_hour == pytest.approx(98_304 * 1.5e-5 * multiple)
    expected = formulas(scenario, row.failures_per_hour)
    assert list(row.estimates) == list(expected)
    for name, found in row.estimates.items():
        assert found.goodput == pytest.approx(expected[name], abs=4 * found.standard_error + 1e-3), name
