"""Simulated strategies: second by second, against formulas, by hand, and in their order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.goodput.closed_forms import (
    lost_until_boundary,
    lost_until_return,
    reroute_until_boundary,
    reroute_until_return,
    restart_throughput,
)
from parallel3d.goodput.elastic_strategy import ElasticStrategy
from parallel3d.goodput.failure_trace import FailureTrace, draw_trace
from parallel3d.goodput.outcome import Estimate, RestartCosts
from parallel3d.goodput.restart_strategy import RestartStrategy
from parallel3d.goodput.scenario import Scenario
from parallel3d.goodput.strategies import build_strategies, compare_strategies
from tests.support.tiers import examples

COSTS = RestartCosts(interval_s=3 * 3600.0, save_s=0.0, restart_s=1200.0)
HOURS_3 = 3 * 3600


def trace_of(seconds: int, *failures: tuple[int, int]) -> FailureTrace:
    """Failures as (second, replica), in order."""
    times, replicas = np.array(failures or np.empty((0, 2)), np.int64).reshape(-1, 2).T
    return FailureTrace(duration_ms=seconds * 1000, times_ms=times * 1000, replicas=replicas)


def strategy_of(unit: Literal["pipeline", "stage"] = "stage", **changes: object) -> ElasticStrategy:
    fields: dict[str, object] = dict(name="", unit=unit, num_stages=2, num_replicas=4, restart=COSTS)
    return ElasticStrategy(**fields | changes)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_nothing_fails():
    for strategy in (strategy_of(), RestartStrategy(name="", restart=COSTS)):
        outcome = strategy.run(trace_of(1000))
        assert (outcome.goodput, outcome.paused, outcome.repeated, outcome.num_restarts) == (1.0, 0.0, 0.0, 0)


def test_a_restart_loses_the_work_since_the_checkpoint():
    costs = RestartCosts(interval_s=100.0, save_s=10.0, restart_s=50.0)
    outcome = RestartStrategy(name="", restart=costs).run(trace_of(1000, (250, 0), (270, 0), (900, 1)))
    # 250 s: two checkpoints, 30 s lost; 20 s: restarting; 630 s: 50 + 5 x 110 + 30 lost; 100 s: 50 + 50
    assert outcome.goodput == pytest.approx((200 + 500 + 50) / 1000)
    assert outcome.paused == pytest.approx((20 + 50 + 50) / 1000)
    assert outcome.repeated == pytest.approx((30 + 30) / 1000)


@pytest.mark.parametrize(
    ("unit", "lost_twice"),
    [("stage", 3 / 4), ("pipeline", 2 / 4)],
)
def test_what_a_second_loss_in_another_stage_costs(unit: Literal["pipeline", "stage"], lost_twice: float):
    """Replica 1 of stage 0, then replica 2 of stage 1: two pipelines, but one replica of each stage."""
    strategy = strategy_of(unit, returns_after_s=400.0, pause_s=10.0, join_pause_s=5.0)
    outcome = strategy.run(trace_of(1000, (100, 1), (300, 6)))
    #          0-100, 110-300,        310-500,               505-700,        705-1000
    expected = 100 + 190 * 3 / 4 + 190 * lost_twice + 195 * 3 / 4 + 295
    assert outcome.goodput == pytest.approx(expected / 1000)
    assert outcome.paused == pytest.approx(30 / 1000)


def test_what_is_out_cannot_be_lost_again():
    strategy = strategy_of("pipeline", returns_after_s=400.0, pause_s=10.0)
    once, twice = (strategy.run(trace_of(1000, *failures)) for failures in ([(100, 1)], [(100, 1), (200, 5)]))
    assert once.goodput == twice.goodput


def test_everything_returns_at_the_boundary():
    strategy = strategy_of(repair_interval_s=500.0, join_pause_s=8.0)
    outcome = strategy.run(trace_of(1000, (100, 0), (400, 1)))
    assert outcome.goodput == pytest.approx((100 + 300 * 3 / 4 + 100 * 2 / 4 + 492) / 1000)


def test_the_last_replica_of_a_stage_restarts_the_run():
    costs = RestartCosts(interval_s=200.0, save_s=0.0, restart_s=60.0)
    strategy = strategy_of(num_replicas=1, restart=costs, pause_s=1.0, returns_after_s=9.0)
    outcome = strategy.run(trace_of(1000, (500, 1)))
    assert outcome.goodput == pytest.approx((400 + 440) / 1000)
    assert (outcome.repeated, outcome.paused, outcome.num_restarts) == (pytest.approx(0.1), pytest.approx(0.06), 1)


def test_planned_speeds():
    strategy = strategy_of(num_replicas=10, speeds=(1.0, 0.97, 0.9))
    assert [strategy.speed(lost) for lost in range(3)] == [1.0, pytest.approx(0.97), pytest.approx(0.9)]
    assert strategy.speed(4) == pytest.approx(0.6 * 0.9 / 0.8)
    assert strategy.speed(10) == 0.0


# --- second by second -------------------------------------------------------------------------------------------------


@dataclass
class SlowRun:
    """The same rules, one second at a time."""

    strategy: ElasticStrategy
    out: dict[tuple[int, int], int] = field(default_factory=dict)
    halted_until: int = 0
    progress: float = 0.0
    saved: float = 0.0

    def run(self, trace: FailureTrace) -> float:
        failures = list(trace)
        for second in range(trace.duration_ms // 1000):
            if second % self.strategy.restart.interval_s == 0:
                self.saved = self.progress
            back = [what for what, end in self.out.items() if end == second]
            for what in back:
                del self.out[what]
            if back:
                self.halted_until = max(self.halted_until, second + int(self.strategy.join_pause_s))
            for when, replica in failures:
                if when == second * 1000:
                    self.lose(second, replica)
            if second >= self.halted_until:
                self.progress += self.strategy.speed(self.most_lost())
        return self.progress / (trace.duration_ms // 1000)

    def most_lost(self) -> int:
        stages = [stage for stage, _ in self.out]
        return max(map(stages.count, stages), default=0)

    def lose(self, second: int, replica: int) -> None:
        stage, number = replica // self.strategy.num_replicas, replica % self.strategy.num_replicas
        what = (0 if self.strategy.unit == "pipeline" else stage, number)
        if what in self.out:
            return
        self.out[what] = self.strategy.returns_at_ms(second * 1000) // 1000
        pause = self.strategy.pause_s
        if self.most_lost() == self.strategy.num_replicas:
            self.out.clear()
            self.progress, pause = self.saved, self.strategy.restart.restart_s
        self.halted_until = max(self.halted_until, second + int(pause))


@st.composite
def small_runs(draw: st.DrawFn) -> tuple[ElasticStrategy, FailureTrace]:
    num_stages, num_replicas = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    strategy = strategy_of(
        draw(st.sampled_from(["pipeline", "stage"])),
        num_stages=num_stages,
        num_replicas=num_replicas,
        pause_s=float(draw(st.integers(0, 5))),
        join_pause_s=float(draw(st.integers(0, 3))),
        returns_after_s=draw(st.none() | st.integers(1, 30).map(float)),
        repair_interval_s=float(draw(st.integers(1, 40))),
        restart=RestartCosts(interval_s=float(draw(st.integers(1, 40))), save_s=0.0, restart_s=draw(st.integers(0, 9))),
    )
    failure = st.tuples(st.integers(0, 99), st.integers(0, num_stages * num_replicas - 1))
    return strategy, trace_of(100, *sorted(draw(st.lists(failure, max_size=25)), key=lambda each: each[0]))


@given(small_runs())
@settings(max_examples=examples(500), deadline=None)
def test_second_by_second(run: tuple[ElasticStrategy, FailureTrace]):
    strategy, trace = run
    assert strategy.run(trace).goodput == pytest.approx(SlowRun(strategy).run(trace), abs=1e-9)


# --- against formulas -------------------------------------------------------------------------------------------------

SCENARIO = Scenario()
REPLICAS, STAGES = 8, 4


def estimate(strategy: ElasticStrategy | RestartStrategy, *, rate: float, num_runs: int = 24) -> Estimate:
    """Of runs of 60 days, with so many failures an hour."""
    traces = [
        draw_trace(failures_per_hour=rate, num_replicas=STAGES * REPLICAS, duration_s=60 * 86_400, seed=(7, run))
        for run in range(num_runs)
    ]
    return Estimate.of([strategy.run(trace) for trace in traces])


@pytest.mark.parametrize("rate", [0.05, 0.4])
@pytest.mark.parametrize(
    ("unit", "returns_after_s"), [("pipeline", None), ("pipeline", 3600.0), ("stage", None), ("stage", 3600.0)]
)
def test_elastic_strategies_without_pauses(unit: Literal["pipeline", "stage"], returns_after_s: float, rate: float):
    """Units that fail and return independently; the loss of a whole stage is too rare to matter."""
    strategy = strategy_of(unit, num_stages=STAGES, num_replicas=REPLICAS, returns_after_s=returns_after_s)
    unit_rate = rate / REPLICAS / (STAGES if unit == "stage" else 1)
    expected = {
        ("pipeline", None): 1 - lost_until_boundary(unit_rate=unit_rate, interval=3.0),
        ("pipeline", 3600.0): 1 - lost_until_return(unit_rate=unit_rate, out=1.0),
        ("stage", None): reroute_until_boundary(
            num_stages=STAGES, replicas=REPLICAS, unit_rate=unit_rate, interval=3.0
        ),
        ("stage", 3600.0): reroute_until_return(num_stages=STAGES, replicas=REPLICAS, unit_rate=unit_rate, out=1.0),
    }[unit, returns_after_s]
    found = estimate(strategy, rate=rate)
    assert found.goodput == pytest.approx(expected, abs=4 * found.standard_error + 1e-4)
    assert found.num_restarts == 0


@pytest.mark.parametrize(("save_s", "rate"), [(0.0, 0.15), (300.0, 0.15), (60.0, 1.0)])
def test_restarts(save_s: float, rate: float):
    costs = replace(COSTS, save_s=save_s)
    found = estimate(RestartStrategy(name="", restart=costs), rate=rate)
    expected = restart_throughput(rate=rate, interval=3, restart=1 / 3, save=save_s / 3600, restart_can_fail=True)
    assert found.goodput == pytest.approx(expected, abs=4 * found.standard_error)


def test_pauses_cost_their_rate():
    """Far between, they add up: failures an hour x seconds; and as many returns."""
    strategy = strategy_of(
        num_stages=STAGES, num_replicas=REPLICAS, returns_after_s=60.0, pause_s=20.0, join_pause_s=10.0
    )
    found = estimate(strategy, rate=0.5)
    assert found.paused == pytest.approx(0.5 * (20 + 10) / 3600, rel=0.02)


# --- comparisons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 10, 50])
def test_the_order_of_strategies(multiple: int):
    """On the same failures: what loses less, or gets it back sooner, does not end lower."""
    recoveries = SCENARIO.recoveries.model_copy(update={"pause_s": 0.0, "step_s": 0.0, "join_pause_s": 0.0})
    failures = SCENARIO.failures.model_copy(update={"multiples": [multiple]})
    scenario = SCENARIO.model_copy(update={"recoveries": recoveries, "failures": failures, "num_runs": 1})
    (row,) = compare_strategies(scenario)
    names = ["restart", "rank drop", "reroute", "reroute, back after 1200 s", "reroute, back after 40 s"]
    goodputs = [row.estimates[name].goodput for name in names]
    assert goodputs == sorted(goodputs)
    assert row.estimates["restart"].goodput < row.estimates["restart, best interval"].goodput
    assert row.failures_per_hour == pytest.approx(8192 * 1.5e-5 * multiple)


def test_what_a_scenario_says_of_its_strategies():
    """Restarts by name, half a step in every pause, rejoins in the given order."""
    strategies = build_strategies(SCENARIO, num_replicas=64, failures_per_hour=1.0, speeds=(1.0, 0.9))
    assert [each.name for each in strategies] == [
        *("restart", "restart, best interval", "rank drop", "replica drop, back after 1200 s"),
        *("reroute", "reroute, back after 40 s", "reroute, back after 1200 s"),
    ]
    elastic = [each for each in strategies if isinstance(each, ElasticStrategy)]
    assert {each.pause_s for each in elastic} == {0.368 + 10.0 / 2} and {each.join_pause_s for each in elastic} == {
        0.657
    }
    assert [each.returns_after_s for each in elastic] == [None, 1200.0, None, 40.0, 1200.0]
    assert [len(each.speeds) for each in elastic] == [0, 0, 2, 2, 2]
    assert {each.restart.interval_s for each in elastic} == {86_400.0}


def test_uptimes_and_elasticity_on_one_trace():
    """HLAT's two uptimes from the same failures, and what they would cost a run that goes on."""
    restarts = SCENARIO.restarts.model_copy(
        update={"interval_s": 900.0, "save_s": 0.0, "restart_s": 583.9, "human_s": 20_622.0}
    )
    scenario = SCENARIO.model_copy(update={"restarts": restarts, "days": 365.0})
    strategies = {each.name: each for each in build_strategies(scenario, num_replicas=64, failures_per_hour=1 / 24)}
    traces = [
        draw_trace(failures_per_hour=1 / 24, num_replicas=1024, duration_s=365 * 86_400, seed=(1, run))
        for run in range(20)
    ]
    for name, uptime in [("restart by hand", 0.7783), ("restart", 0.9881), ("rank drop", 0.999)]:
        found = Estimate.of([strategies[name].run(trace) for trace in traces])
        assert found.goodput == pytest.approx(uptime, abs=4 * found.standard_error + 5e-5), name


def test_the_same_seed_gives_the_same_failures():
    first, again, other = (
        draw_trace(failures_per_hour=3.0, num_replicas=16, duration_s=86_400, seed=seed)
        for seed in [(1, 0)] * 2 + [(1, 1)]
    )
    assert list(first) == list(again) != list(other)
    assert list(first)[:2] == sorted(first)[:2] and len(first) > 40
