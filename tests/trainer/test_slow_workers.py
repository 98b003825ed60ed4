"""Slow workers get less work, and the run stays the undisturbed one, bit for bit.

Ranks are threads; a compute takes a second by their clock, on a slow rank two or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from parallel3d.config.schema import Config, ElasticConfig, FaultConfig
from parallel3d.inprocess.harness import ElasticRunResult
from parallel3d.parallel.grid import Grid
from parallel3d.pipeline.compute_clock import ComputeClock, DeviceClock, HostClock
from parallel3d.pipeline.request import NORMAL
from parallel3d.pipeline.slow_replicas import WINDOW, ReplicaSpeeds
from parallel3d.trainer.build import choose_clock
from parallel3d.trainer.context import RankContext, RankHooks
from parallel3d.trainer.plans import Plans, build_grid, unit_times
from parallel3d.trainer.state import TrainState
from parallel3d.trainer.step import own_seconds
from tests.support import tiny_runs
from tests.support.join_runs import dies, run_with_joins
from tests.support.lazy_accelerator import LazyAccelerator
from tests.support.thread_kills import assert_same_run, run


def make_config(parallel: dict[str, Any], num_steps: int, balance: bool = True, **sections: dict[str, Any]) -> Config:
    shape = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    return tiny_runs.make_config(
        model=shape | sections.pop("model", {}),
        parallel=dict(bucket_mib=0.003, **parallel),
        batch=dict(global_batch_size=8, micro_batch_size=1, sequence_length=4) | sections.pop("batch", {}),
        precision=dict(policy="fp64", sums="exact"),
        run=dict(num_steps=num_steps, evaluate_every=8, evaluate_batches=1),
        elastic=dict(balance=balance),
        **sections,
    )


def slow(rank: int, step: int = 1, num_steps: int | None = None, factor: float = 2.0) -> FaultConfig:
    return FaultConfig(rank=rank, step=step, kind="slow", factor=factor, num_steps=num_steps)


def check(
    config: Config, faults: Sequence[FaultConfig], joins: Sequence[int] = (), *, num_changes: int = 0
) -> ElasticRunResult:
    """Runs the configuration with these faults: it must be the undisturbed one on equal routes."""
    done = run_with_joins(config, faults, joins)
    elastic = config.elastic.model_copy(update=dict(balance=False))
    assert_same_run(done, run(config.model_copy(update=dict(elastic=elastic))))
    assert done.num_changes == num_changes
    return done


def test_routes_follow_the_speed_and_return():
    """One of two is at half speed in steps 3 to 32. The clock of threads has no noise: the steps are known."""
    done = check(make_config(dict(dp_size=2), 42), [slow(1, 3, 30)])
    found, forgiven = done.balances
    assert (found["step"], found["slow"]) == (WINDOW, {"pp0 dp1 (rank 1)": 2.0})
    assert found["step_share"] == 6 / 8  # 8 micro-batches: 6, and 2 of twice the time, not 4 of it
    assert (forgiven["step"], forgiven["slow"], forgiven["step_share"]) == (32 + 1 + WINDOW // 2, {}, 4 / 6)
    assert "pp0 dp1 (rank 1) 2.0 x; steps are planned to take 0.75 x" in found["text"]
    assert "no replica is slow any more" in forgiven["text"]


@pytest.mark.full
def test_one_of_four_at_half_speed():
    """Of 32 micro-batches it does 4 or 5, so that a step takes 10 units in place of 16: dropping it would take 11."""
    config = make_config(dict(dp_size=4), WINDOW + 3, batch=dict(global_batch_size=32))
    (found,) = check(config, [slow(3)]).balances
    assert (found["step"], found["slow"], found["step_share"]) == (WINDOW, {"pp0 dp3 (rank 3)": 2.0}, 10 / 16)


ROWS: dict[str, tuple[dict[str, Any], list[FaultConfig], list[int], int]] = {
    "pp2-dp3": (dict(pp_size=2, dp_size=3), [slow(1), slow(5, factor=3.0)], [], 0),
    "tp2": (dict(dp_size=2, tp_size=2), [slow(2)], [], 0),
    "zb-v": (dict(pp_size=2, dp_size=2, schedule="zb-v"), [slow(1)], [], 0),
    "zero0": (dict(dp_size=3, zero_stage=0), [slow(0)], [], 0),
    "too slow for work": (dict(dp_size=3), [slow(1, factor=20.0)], [], 0),
    **{
        f"another dies in {phase}": (dict(pp_size=2, dp_size=3), [slow(1), dies(4, WINDOW, phase)], [], 1)
        for phase in ("forward", "all_reduce", "update", "all_gather")
    },
    "the leader dies as it finds out": (dict(dp_size=3), [slow(1), dies(0, WINDOW, "update")], [], 1),
    "one dies while it is known": (dict(dp_size=4), [slow(1), dies(3, WINDOW + 5, "backward")], [], 1),
    "the slow one dies, and one comes": (dict(dp_size=3), [slow(1), dies(1, WINDOW + 3)], [WINDOW + 4], 2),
    "another comes": (dict(pp_size=2, dp_size=3), [slow(1), dies(0, 4), dies(5, WINDOW + 4)], [6, WINDOW + 5], 4),
    "one comes and is slow": (dict(dp_size=3), [dies(2, 2), slow(3)], [4], 2),
}
"""Layouts, faults, the steps of joins, and the changes of membership."""


@pytest.mark.sample(4, rest=4)
@pytest.mark.parametrize("name", ROWS)
def test_the_run_is_the_undisturbed_one(name: str):
    parallel, faults, joins, num_changes = ROWS[name]
    sections = dict(model=dict(num_hidden_layers=4)) if "schedule" in parallel else {}
    if sections:
        parallel = dict(**parallel, virtual_stages=2)
    done = check(make_config(parallel, WINDOW + 8, **sections), faults, joins, num_changes=num_changes)
    assert done.balances


def put_on_a_device(rank: int, runtime: RankContext) -> None:
    """The rank's clock is that of a stand-in, which takes a second for a chunk forward and two backward."""
    device = LazyAccelerator()

    def take(seconds: float) -> None:
        device.now_s += seconds

    def on_output(chunk: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        take(1.0)
        if output.requires_grad:
            output.register_hook(lambda grad: take(2.0))

    for chunk in runtime.chunks:
        chunk.register_forward_hook(on_output)
    runtime.clock = DeviceClock(device, runtime.hooks.slowness)


DEVICE_ROWS: dict[str, dict[str, Any]] = {
    "dp2": dict(dp_size=2),
    "pp2-dp3": dict(pp_size=2, dp_size=3),
    "tp2": dict(dp_size=2, tp_size=2),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DEVICE_ROWS)
def test_on_a_device_its_own_seconds_choose_the_routes(name: str):
    config = make_config(DEVICE_ROWS[name], WINDOW + 8)
    slow_rank = build_grid(config).ranks[-1]
    done = run(config, [slow(slow_rank)], watch=put_on_a_device)
    assert_same_run(done, run(config.model_copy(update=dict(elastic=ElasticConfig()))))
    (found,) = done.balances
    assert found["step"] == WINDOW and list(found["slow"].values()) == [2.0] and found["step_share"] < 1
    assert not done.notices, "within a tensor-parallel group a device does not know who waits"


def test_a_device_that_is_not_slow_keeps_its_routes():
    done = run(make_config(dict(dp_size=2), WINDOW + 3), watch=put_on_a_device)
    assert not done.balances


@pytest.mark.parametrize(
    ("device", "settings", "of_device"),
    [
        ("cpu", dict(balance=True), False),
        ("cuda:0", dict(balance=True), True),
        ("cuda:0", dict(), False),
        ("cuda:0", dict(faults=[slow(0)]), True),
        ("cuda_shared", dict(balance=True, faults=[slow(0)]), False),
    ],
)
def test_a_devices_clock_is_asked_where_its_seconds_are_of_use(device: str, settings: dict[str, Any], of_device: bool):
    plain = make_config(dict(dp_size=2), 2)
    run_config = plain.run.model_copy(update=dict(device=device.partition(":")[0]))
    config = plain.model_copy(update=dict(run=run_config, elastic=ElasticConfig(**settings)))
    clock = choose_clock(config, torch.device(device.replace("cuda_shared", "cuda:0")), RankHooks())
    assert isinstance(clock, DeviceClock if of_device else HostClock)


@pytest.mark.parametrize(
    ("device", "clock", "expected"),
    [
        ("cpu", HostClock(), 2.0),
        ("cuda", DeviceClock(LazyAccelerator()), 5.0),
        ("cuda", HostClock(), 0.0),
    ],
)
def test_the_hosts_seconds_say_nothing_of_a_device(device: str, clock: ComputeClock, expected: float):
    assert own_seconds(torch.device(device), clock, 5.0, 3.0) == expected


def test_a_slow_worker_hands_its_place_over():
    """The one that takes its place begins at normal speed, under the same coordinates."""
    done = check(make_config(dict(dp_size=2), WINDOW + 8), [slow(1), dies(1, WINDOW + 3)], [WINDOW + 5], num_changes=2)
    assert [record["slow"] for record in done.balances] == [{"pp0 dp1 (rank 1)": 2.0}]
    assert len(done.steps) == WINDOW + 8 and done.widths == (2,)
    config, state = make_config(dict(dp_size=2), 1), TrainState(speeds=ReplicaSpeeds(slowness={(0, 1): 2 * NORMAL}))
    assert Plans(config, build_grid(config)).slowness(state) == ((NORMAL, 2 * NORMAL),)
    assert Plans(config, Grid(({0: (0,), 1: (2,)},))).slowness(state) == ()


def test_times_are_of_a_tokens_work():
    """Whatever the length of sequences and the share; the slowest rank counts; unknown seconds say nothing."""
    config = make_config(dict(dp_size=2, tp_size=2), 1)
    grid, plan = build_grid(config), Plans(config, build_grid(config)).train(3)  # the first replica has two of three
    times = unit_times(grid, plan, {0: 1.0, 1: 4.0, 2: 2.0, 3: 1.5}, num_tokens=300)
    assert times == ((0, 1, 0.02), (0, 3, 0.02))
    assert unit_times(grid, plan, {0: 1.0, 1: 4.0, 2: 0.0, 3: 1.5}, num_tokens=600) == ((0, 1, 0.01), (0, 3, 0.0))
    assert unit_times(grid, Plans(config, grid).train(1), dict.fromkeys(range(4), 1 / 3), num_tokens=10) == (
        (0, 1, 0.0333),
        (0, 3, 0.0),
    )


def test_the_slow_one_of_tensor_parallel_ranks_is_named():
    done = check(make_config(dict(dp_size=2, tp_size=2), WINDOW + 2), [slow(3)])
    assert [record["slow"] for record in done.balances] == [{"pp0 dp1 (ranks 2, 3)": 2.0}]
    (named,) = done.notices
    assert named == (
        f"step {WINDOW}: rank 3 (pp0 dp1 tp1) slows its replica down: "
        "it computes 2.0 x as long as the fastest of 2 tensor-parallel ranks"
    )
