"""Plans made ahead: those that a recovery would make, only while the rank waits, and never after its generation."""

import sys
import threading
import time

import pytest

from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.trainer import planned_losses as module
from parallel3d.trainer.planned_losses import PlannedLosses, first_losses
from parallel3d.trainer.plans import Plans, build_grid, plan_schedule
from tests.support.socket_links import until
from tests.support.tiny_runs import make_config

CONFIG = make_config(parallel=dict(pp_size=2, dp_size=3, tp_size=2))
GRID = build_grid(CONFIG)
NUM_MICRO_BATCHES = 8


@pytest.fixture(autouse=True)
def worth_it(monkeypatch):
    monkeypatch.setattr(module, "MIN_COMPUTES", 1)


def begin(planned=None, token=None):
    planned, token = planned or PlannedLosses(CONFIG), token or AbortToken()
    thread = planned.begin(GRID, NUM_MICRO_BATCHES, token)
    return planned, token, thread


def test_a_loss_finds_the_plan_that_it_would_have_made():
    planned, token, thread = begin()
    with token.waiting():
        thread.join(timeout=300)
    lost = [GRID.without(ranks[:1])[0] for stage in GRID.stages for ranks in stage.values()]
    assert set(planned.plans) == {(grid.replicas, NUM_MICRO_BATCHES) for grid in lost} and len(lost) == 6
    for grid in lost:
        ahead = planned.plans[grid.replicas, NUM_MICRO_BATCHES]
        assert ahead.digest == plan_schedule(CONFIG, grid, NUM_MICRO_BATCHES).digest
        assert Plans(CONFIG, grid, planned.plans).train(NUM_MICRO_BATCHES) is ahead
        assert Plans(CONFIG, grid, planned.plans).train(4) is not ahead


@pytest.fixture
def instants(monkeypatch):
    """The instants of a plan that never ends."""
    seen = []

    def plan_for_ever(config, grid, num_micro_batches, *, pause):
        while True:
            pause()
            seen.append(time.sleep(0.001))

    monkeypatch.setattr(module, "plan_schedule", plan_for_ever)
    return seen


def test_nothing_is_planned_while_the_rank_computes(instants):
    _, token, thread = begin()
    thread.join(timeout=0.1)
    assert thread.is_alive() and not instants
    for _ in range(2):
        with token.waiting():
            before = len(instants)
            until(lambda before=before: len(instants) > before + 3)
        now = len(instants)
        assert now > before + 3
        thread.join(timeout=0.1)
        assert len(instants) <= now + 1  # the one that had begun
    token.abort("over")
    thread.join(timeout=300)
    assert not thread.is_alive()


def test_planning_ends_in_the_middle_of_a_wait(instants):
    planned, token, thread = begin()
    with token.waiting():
        until(lambda: len(instants) > 3)
        token.abort("a worker is lost")
        thread.join(timeout=300)
        assert not thread.is_alive() and not planned.plans


def test_the_end_of_a_generation_ends_its_planning(monkeypatch):
    planned, token, thread = begin()
    token.abort("a worker is lost")
    thread.join(timeout=300)
    assert not thread.is_alive() and not planned.plans
    assert sys.getswitchinterval() == planned._interval_s


def test_waits_are_reported_as_before():
    waits, token = [], AbortToken()
    token.on_wait = waits.append
    _, _, thread = begin(token=token)
    with token.waiting("a group", (1, 2)):
        thread.join(timeout=300)
    assert waits[0].what == "a group" and waits[-1] is None
    token.on_wait(None)
    assert len(waits) == 3


def test_small_grids_are_planned_when_they_are_needed(monkeypatch):
    monkeypatch.setattr(module, "MIN_COMPUTES", 1 << 13)
    before = threading.active_count()
    planned, _, thread = begin()
    assert thread is None and not planned.plans and threading.active_count() == before


def test_no_more_is_kept_than_the_memory_is_meant_for(monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPUTES", 3 * NUM_MICRO_BATCHES * GRID.pp_size)
    planned, token, thread = begin()
    with token.waiting():
        thread.join(timeout=300)
    assert len(planned.plans) == 3


def test_a_stage_with_one_replica_has_no_loss_to_plan():
    grid = Grid.of_replicas([1, 2], tp_size=1)
    assert [smaller.replicas for smaller in first_losses(grid)] == [((0,), (1,)), ((0,), (0,))]
