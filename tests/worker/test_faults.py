"""Injected faults: drawn alike in every process, happening once, where and when they were ordered."""

import random
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.schema import ElasticConfig, FaultConfig, RandomFaults
from parallel3d.trainer.loop import Phase
from parallel3d.worker.fault_injection import STEP_PHASES, FaultInjector, plan_faults
from parallel3d.worker.hooks import WorkerHooks
from tests.support import tiny_runs


def lots(**fields):
    return ElasticConfig(random_faults=RandomFaults(**{"probability": 0.1, "max_faults": 1000, **fields}))


def fault(rank=0, step=2, phase="forward", kind="kill"):
    return FaultConfig(rank=rank, step=step, phase=phase, kind=kind)


# --- which ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_a_draw_depends_on_seed_step_and_rank_alone(seed, world_size, num_steps, max_faults):
    """Neither on the state of Python's generator, nor on how many ranks and steps come after."""
    config = lots(seed=seed, max_faults=max_faults, probability=0.3)
    random.seed(seed)
    drawn = plan_faults(config, world_size=world_size, num_steps=num_steps)
    random.seed(seed + 1)
    assert plan_faults(config, world_size=world_size, num_steps=num_steps) == drawn
    assert len(drawn) <= max_faults
    assert all(1 <= each.step <= num_steps and each.rank < world_size for each in drawn)
    every = plan_faults(lots(seed=seed, probability=0.3), world_size=world_size, num_steps=num_steps + 3)
    assert drawn == tuple(each for each in every if each.step <= num_steps)[:max_faults]


def test_after_a_restart_others_are_drawn_and_ordered():
    config = ElasticConfig(
        faults=[fault(), FaultConfig(rank=0, step=2, attempt=1)],
        random_faults=RandomFaults(probability=0.1, max_faults=1000),
    )
    first, second = (plan_faults(config, world_size=8, num_steps=50, attempt=attempt) for attempt in (0, 1))
    assert (first[0].attempt, second[0].attempt) == (0, 1)
    assert set(map(str, first[1:])) != set(map(str, second[1:])) and len(second) > 1


def test_another_process_draws_the_same():
    """Hashes of strings differ from process to process: nothing may hang on them."""
    code = (
        "from parallel3d.config.schema import *; from parallel3d.worker.fault_injection import plan_faults; "
        "lots = RandomFaults(probability=0.1, max_faults=9, seed=3); "
        "print([f.model_dump() for f in plan_faults(ElasticConfig(random_faults=lots), world_size=8, num_steps=20)])"
    )
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ours = plan_faults(lots(max_faults=9, seed=3), world_size=8, num_steps=20)
    assert len(ours) == 9 and theirs.strip() == str([each.model_dump() for each in ours])


def test_draws_are_as_many_as_the_probability_says_and_of_every_phase():
    drawn = plan_faults(lots(probability=0.05, max_faults=10**6, kind="stop"), world_size=20, num_steps=500)
    assert len(drawn) == pytest.approx(500, rel=0.15)  # of 10,000: a standard deviation is 4.4 %
    assert {each.kind for each in drawn} == {"stop"}
    phases = Counter(each.phase for each in drawn)
    assert set(phases) == set(STEP_PHASES) and min(phases.values()) > 20
    assert len({each.rank for each in drawn}) == 20


def test_no_probability_draws_nothing_and_what_was_ordered_comes_too():
    ordered = [fault(), fault(rank=3, phase="recovery_moves")]
    assert plan_faults(ElasticConfig(), world_size=8, num_steps=100) == ()
    assert plan_faults(ElasticConfig(faults=ordered), world_size=8, num_steps=100) == tuple(ordered)
    both = ElasticConfig(faults=ordered, random_faults=RandomFaults(probability=0.5, max_faults=2))
    assert len(plan_faults(both, world_size=8, num_steps=100)) == 4


# --- when -------------------------------------------------------------------------------------------------------------


def injector(*faults, rank=0):
    happened = []
    return FaultInjector(faults, rank, happened.append), happened


STEP = ["load", "send targets", "forward", "send activation", "receive gradient", "backward"]


def run_step(fault_hook, step, phases=("reduce_scatter", "backup", "all_reduce", "update", "all_gather")):
    fault_hook.begin_step(step)
    for op in STEP:
        fault_hook.enter_instruction(op)
    for phase in phases:
        fault_hook(phase)


@pytest.mark.parametrize("phase", STEP_PHASES)
@pytest.mark.parametrize("kind", ["kill", "stop", "term"])
def test_a_fault_happens_in_its_step_and_once(phase, kind):
    fault_hook, happened = injector(fault(step=2, phase=phase, kind=kind))
    run_step(fault_hook, 1)
    assert happened == []
    run_step(fault_hook, 2)
    assert happened == [kind]
    run_step(fault_hook, 2)  # the step again, after a loss elsewhere
    run_step(fault_hook, 3)
    assert happened == [kind]


def test_faults_of_others_are_nothing_to_a_rank():
    fault_hook, happened = injector(fault(rank=1), rank=0)
    run_step(fault_hook, 2)
    assert happened == []


def joining(number, *faults, at="pp1 dp0 tp0"):
    happened = []
    return FaultInjector(faults, 8 + number, happened.append, joiner=number, coordinates=lambda: at), happened


@pytest.mark.parametrize("phase", ["build", "recovery_report", "recovery_groups"])
def test_a_joiner_fails_where_it_is_told_to(phase):
    ordered = FaultConfig(joiner=2, phase=phase)
    for number in (-7, 0, 1, 2, 3):
        fault_hook, happened = joining(number, ordered)
        for each in ("build", "recovery_report", "recovery_moves", "recovery_confirm", "recovery_groups"):
            fault_hook(each)
        assert happened == (["kill"] if number == 2 else [])


@pytest.mark.parametrize("phase", ["forward", "recovery_moves"])
def test_a_fault_goes_by_coordinates_and_not_to_who_takes_them_over(phase):
    ordered = FaultConfig(coordinates="pp1 dp0 tp0", step=3, phase=phase)
    first, happened = joining(-1, ordered)
    elsewhere, not_there = joining(-2, ordered, at="pp0 dp0 tp0")
    for fault_hook in (first, elsewhere):
        run_step(fault_hook, 3)
        fault_hook("recovery_moves")
    assert happened == ["kill"] and not_there == []
    successor, spared = joining(1, ordered)
    successor("recovery_moves")  # enters
    for step in (5, 6):
        run_step(successor, step)
        successor("recovery_moves")
    assert spared == []


def test_a_joiner_fails_by_its_coordinates_later():
    fault_hook, happened = joining(1, FaultConfig(coordinates="pp1 dp0 tp0", step=6))
    for step in (5, 6):
        run_step(fault_hook, step)
    assert happened == ["kill"]


def test_several_faults_of_one_rank():
    fault_hook, happened = injector(
        fault(step=1, kind="stop"), fault(step=1, phase="update", kind="term"), fault(step=3)
    )
    for step in (1, 2, 3):
        run_step(fault_hook, step)
    assert happened == ["stop", "term", "kill"]


@pytest.mark.parametrize("backward", ["backward", "backward input"])
def test_a_backward_pass_in_halves_is_one(backward):
    fault_hook, happened = injector(fault(phase="backward"))
    fault_hook.begin_step(2)
    for op in ("load", "forward"):
        fault_hook.enter_instruction(op)
    assert happened == []
    fault_hook.enter_instruction(backward)
    assert happened == ["kill"]


def test_send_is_between_a_send_and_the_receive_that_follows():
    fault_hook, happened = injector(fault(phase="send"))
    fault_hook.begin_step(2)
    for op in ("load", "send targets", "forward", "send activation", "forward", "receive gradient"):
        fault_hook.enter_instruction(op)
    assert happened == []
    fault_hook.enter_instruction("send gradient")
    fault_hook.enter_instruction("receive activation")
    assert happened == ["kill"]


def test_a_send_of_a_step_that_was_left_is_forgotten():
    fault_hook, happened = injector(fault(phase="send"))
    fault_hook.begin_step(2)
    fault_hook.enter_instruction("send gradient")
    fault_hook.begin_step(2)
    fault_hook.enter_instruction("receive activation")
    assert happened == []


@pytest.mark.parametrize("phase", ["recovery_report", "recovery_moves", "recovery_confirm", "recovery_groups"])
def test_a_fault_in_a_recovery_waits_for_the_first_from_the_step_before_on(phase):
    fault_hook, happened = injector(fault(step=3, phase=phase))
    fault_hook(phase)  # the run begins
    fault_hook.begin_step(1)
    fault_hook(phase)
    assert happened == []
    fault_hook.begin_step(2)
    fault_hook(phase)
    assert happened == ["kill"]
    fault_hook.begin_step(3)
    fault_hook(phase)
    assert happened == ["kill"]


def test_the_start_of_a_run_is_a_recovery_too():
    fault_hook, happened = injector(fault(step=1, phase="recovery_moves"))
    fault_hook("recovery_report")
    assert happened == []
    fault_hook("recovery_moves")
    assert happened == ["kill"]


def test_a_fault_in_an_evaluation_belongs_to_the_step_before_it():
    fault_hook, happened = injector(fault(step=2, phase="evaluate"))
    for step in (1, 2):
        run_step(fault_hook, step)
        fault_hook.begin_step(step)
        fault_hook("evaluate")
        assert len(happened) == step - 1


def test_a_sleep_is_slept_and_kills_nobody(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    sleep = FaultConfig(rank=0, step=2, phase="forward", kind="sleep", seconds=7.5)
    fault_hook, happened = injector(sleep)
    run_step(fault_hook, 2)
    run_step(fault_hook, 2)
    assert slept == [7.5] and happened == []


def test_a_worker_is_slow_by_the_host_or_by_its_device_for_some_steps():
    slow = {"rank": 0, "step": 2, "kind": "slow", "factor": 3.0, "num_steps": 2}
    config = tiny_runs.make_config(run=dict(num_steps=9), elastic=dict(faults=[slow]))
    ignored = SimpleNamespace(begin=lambda *args: None)
    hooks = WorkerHooks(config, SimpleNamespace(rank=0, world_size=2, heartbeat=ignored, worker_status=ignored))
    slept, found = [], []
    hooks._injector.sleep = slept.append
    rank_hooks = hooks.for_rank()
    for step in range(1, 6):
        hooks.begin(Phase.STEP, step)
        found.append((rank_hooks.slowness(), rank_hooks.compute_hook(0.5)))
    assert found == [(1.0, 0.5), (3.0, 1.5), (3.0, 1.5), (1.0, 0.5), (1.0, 0.5)] and slept == [1.0, 1.0]
