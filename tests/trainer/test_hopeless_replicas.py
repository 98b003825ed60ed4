"""A replica that is too slow to be of any use leaves the run; who decides that, when, and what the run is then."""

from __future__ import annotations

import random
from typing import Any

import pytest

from parallel3d.config.schema import Config, FaultConfig
from parallel3d.parallel.grid import Grid
from parallel3d.pipeline.slow_replicas import HOLD, WINDOW, ReplicaSpeeds
from parallel3d.trainer.hopeless_replicas import HopelessReplica, find_hopeless, settled_slow_replicas
from parallel3d.trainer.plans import Plans, build_grid
from parallel3d.trainer.state import TrainState
from tests.support import tiny_runs
from tests.support.join_runs import dies, run_with_joins
from tests.support.thread_kills import assert_same_run, run
from tests.trainer.test_slow_workers import make_config, slow

FOUND = WINDOW // 2 + 1
"""Steps until one that is slow from the second step on counts as slow."""


def plans_of(num_micro_batches: int = 32, grid: Grid | None = None, **parallel: Any) -> Plans:
    config = tiny_runs.make_config(
        model=dict(hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2),
        parallel=dict(dp_size=4) | parallel,
        batch=dict(global_batch_size=num_micro_batches, micro_batch_size=1, sequence_length=4),
        elastic=dict(balance=True),
    )
    return Plans(config, grid or build_grid(config))


def known(plans: Plans, factors: dict[int, float], num_steps: int = WINDOW + HOLD) -> TrainState:
    """The state after steps in which some ranks were slow."""
    speeds = ReplicaSpeeds()
    for _ in range(num_steps):
        speeds = speeds.after(
            {(plans.grid.coordinates(rank).pp, rank): factors.get(rank, 1.0) for rank in plans.grid.ranks}
        )
    return TrainState(speeds=speeds)


@pytest.mark.parametrize(
    ("factor", "num_micro_batches", "share"),
    [
        (10.0, 32, 1.0),
        (64.0, 32, 1.0),
        (2.0, 32, None),  # 10 units of time with it, 11 without
        (4.0, 32, None),
        (4.0, 24, 1.0),  # 8, either way
        (3.0, 24, None),  # as well, but it is not that slow
        (1.0, 32, None),
    ],
)
def test_one_of_four_replicas(factor: float, num_micro_batches: int, share: float | None):
    plans = plans_of(num_micro_batches)
    found = find_hopeless(plans, known(plans, {3: factor}))
    expected = share and HopelessReplica(replica=(0, 3), ranks=(3,), factor=factor, step_share=share)
    assert found == expected


def test_what_is_still_measured_is_not_decided_on():
    """A change of slowness holds for a while; the decision waits until it could have changed again."""
    plans = plans_of()
    for num_steps in (WINDOW - 1, WINDOW, WINDOW + HOLD - 1):
        assert find_hopeless(plans, known(plans, {3: 10.0}, num_steps)) is None, num_steps
    assert find_hopeless(plans, known(plans, {3: 10.0}, WINDOW + HOLD)) is not None


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_noise_drains_nobody(seed: int, factor: float):
    """1,000 steps of four replicas, each off by 10 % (one standard deviation), now and then ten times as slow; all are
    equal, or one is at half speed."""
    noise, plans, state = random.Random(seed), plans_of(), TrainState()
    for step in range(1_000):
        times = {(0, rank): noise.lognormvariate(0, 0.1) * (factor if rank == 3 else 1.0) for rank in range(4)}
        if noise.random() < 0.1:
            times[0, noise.randrange(4)] *= 10.0
        state = TrainState(speeds=state.speeds.after(times))
        assert find_hopeless(plans, state) is None, step
    assert bool(state.speeds.slowness) is (factor > 1.0)


def test_a_noisy_replica_is_drained_once_it_is_slow():
    noise, plans, state = random.Random(0), plans_of(), TrainState()
    found = []
    for step in range(200):
        times = {(0, rank): noise.lognormvariate(0, 0.1) for rank in range(4)}
        times[0, 3] *= 10.0 if step >= 100 else 1.0
        state = TrainState(speeds=state.speeds.after(times))
        found.append(find_hopeless(plans, state))
    assert found[: 100 + FOUND + HOLD - 1] == [None] * (100 + FOUND + HOLD - 1)
    assert all(each is not None and each.ranks == (3,) for each in found[100 + FOUND + 2 * HOLD :])


def test_the_slowest_leaves_first_and_two_stay():
    """Of a stage of three. One of two is kept, however slow it is."""
    plans = plans_of()
    state = known(plans, {1: 20.0, 2: 40.0})
    assert settled_slow_replicas(plans, state) == ((0, 2), (0, 1))
    for gone in (2, 1):
        found = find_hopeless(plans, state)
        assert found is not None and found.ranks == (gone,)
        plans = Plans(plans.config, plans.grid.without(found.ranks)[0])
    assert plans.grid.replicas == ((0, 3),)
    pair = Plans(plans.config, Grid(({0: (0,), 1: (1,)},)))
    assert find_hopeless(pair, known(pair, {1: 60.0})) is None


def test_one_that_has_left_is_no_longer_meant():
    """Its speed is known until the next step. So is one that is slow beside one that is not there any more."""
    plans = plans_of()
    state = known(plans, {3: 10.0})
    assert find_hopeless(Plans(plans.config, plans.grid.without([3])[0]), state) is None
    rest = Plans(plans.config, Grid(({4: (4,), 5: (5,), 6: (6,)},)))
    assert settled_slow_replicas(rest, TrainState(speeds=ReplicaSpeeds(slowness={(0, r): 99 for r in (4, 5, 6)}))) == ()


def test_a_replica_of_a_pipeline():
    """Its tensor-parallel ranks leave together; the other stages keep theirs."""
    plans = plans_of(pp_size=2, dp_size=3, tp_size=2)
    newest = max(plans.grid.tp_ranks((1, 1)))
    found = find_hopeless(
        plans, known(plans, {rank: 60.0 if rank == newest else 1.0 for rank in plans.grid.ranks[1::2]})
    )
    assert found is not None and (found.replica, found.ranks) == ((1, 1), plans.grid.tp_ranks((1, 1)))
    assert found.step_share <= 1.0


# --- runs -------------------------------------------------------------------------------------------------------------

LEAVES = WINDOW + HOLD
"""The step after which the leader asks that one leaves that was slow from the start; it leaves after the next."""


def check(
    config: Config, faults: list[FaultConfig], joins: list[int], *, left: list[list[int]], widths: tuple[int, ...]
) -> int:
    """Runs the configuration: it must be the undisturbed one, and lose and get these. Returns the number of changes."""
    done = run_with_joins(config, faults, joins)
    elastic = config.elastic.model_copy(update=dict(balance=False))
    assert_same_run(done, run(config.model_copy(update=dict(elastic=elastic))))
    assert [record["ranks"] for record in done.drains] == left and done.widths == widths
    return done.num_changes


ROWS: dict[str, tuple[dict[str, Any], list[FaultConfig], list[int], list[list[int]], tuple[int, ...], int]] = {
    "it leaves": (dict(dp_size=4), [slow(3, factor=10.0)], [], [[3]], (3,), 1),
    "the leader leaves": (dict(dp_size=4), [slow(0, factor=10.0)], [], [[0]], (3,), 1),
    "it returns": (dict(dp_size=4), [slow(3, factor=10.0)], [LEAVES + 3], [[3]], (4,), 2),
    "it is slow again": (
        dict(dp_size=4),
        [slow(3, factor=10.0), slow(4, factor=10.0)],
        [LEAVES + 3, 2 * LEAVES + 8],
        [[3], [4]],
        (4,),
        4,
    ),
    "pp2-dp3": (dict(pp_size=2, dp_size=3), [slow(4, factor=50.0)], [LEAVES + 25], [[4]], (3, 3), 2),
    "tp2": (
        dict(dp_size=3, tp_size=2),
        [slow(5, factor=30.0)],
        [LEAVES + 3, LEAVES + 3],
        [[4, 5]],
        (3,),
        2,
    ),
    "another dies": (
        dict(dp_size=4),
        [slow(3, factor=10.0), dies(1, LEAVES + 1)],
        [LEAVES + 3, LEAVES + 5],
        [[3]],
        (4,),
        4,
    ),
    "the leader dies as it asks": (
        dict(dp_size=4),
        [slow(3, factor=10.0), dies(0, LEAVES, "update")],
        [LEAVES + 3, LEAVES + 5],
        [[3]],
        (4,),
        4,
    ),
    "it dies before it leaves": (
        dict(dp_size=4),
        [slow(3, factor=10.0), dies(3, LEAVES + 1)],
        [LEAVES + 3],
        [[3]],
        (4,),
        2,
    ),
    "one dies in the recovery from a loss": (
        dict(dp_size=5),
        [slow(4, factor=10.0), dies(0, LEAVES + 1), dies(2, LEAVES + 1, "recovery_confirm")],
        [LEAVES + 2, LEAVES + 3, LEAVES + 4],
        [[4]],
        (5,),
        5,
    ),
}
"""Layouts, faults, the steps of joins, who leaves since it is slow, the widths at the end, the changes of membership at
most: a death may come with that of another one."""


@pytest.mark.sample(2, rest=4)
@pytest.mark.parametrize("name", ROWS)
def test_the_run_is_the_undisturbed_one(name: str):
    parallel, faults, joins, left, widths, num_changes = ROWS[name]
    config = make_config(parallel, max([*joins, LEAVES]) + 8)
    assert (
        num_changes - any(fault.kind == "kill" for fault in faults)
        <= check(config, faults, joins, left=left, widths=widths)
        <= num_changes
    )


@pytest.mark.parametrize(("parallel", "elastic"), [(dict(dp_size=4), dict(drain_slow=False)), (dict(dp_size=2), {})])
def test_a_replica_that_stays(parallel: dict[str, Any], elastic: dict[str, Any]):
    config = make_config(parallel, LEAVES + 8)
    config = config.model_copy(update=dict(elastic=config.elastic.model_copy(update=elastic)))
    assert check(config, [slow(1, factor=10.0)], [], left=[], widths=(parallel["dp_size"],)) == 0


def test_what_is_told():
    done = run_with_joins(make_config(dict(dp_size=4), LEAVES + 3), [slow(3, factor=10.0)], [])
    (record,) = done.drains
    assert (record["step"], record["ranks"], record["slow"], record["step_share"]) == (LEAVES, [3], 10.0, 1.0)
    assert record["text"] == (
        "pp0 dp3 (rank 3) takes 10.0 x as long as the fastest of its stage; "
        "without it, steps are planned to take 1.00 x as long"
    )
