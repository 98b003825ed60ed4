"""Loops over a DataLoader that lose no sample, in threads: the bits of `elastic.steps`, through any losses."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from parallel3d.elastic.drop_in.elastic_loop import CURRENT, EARLY_UPDATE, DataParallel, Sampler, steps
from parallel3d.elastic.drop_in.gradient_sums import OUTSIDE
from parallel3d.elastic.drop_in.session import NO_UPDATE
from parallel3d.errors import UserError
from parallel3d.inprocess.scheduler import RankDied
from parallel3d.inprocess.world import ThreadWorld, run_threads
from tests.support.loop_threads import LoopRun, LoopSpec, LoopWorld, Numbers, make_model, run_loop

NUM_CALLS = 14
"""Communication calls of one of three workers: one or two with the state, then two a step."""
HARD: dict[str, Any] = dict(max_norm=0.5, schedule="steps")
"""Gradients of a part of the step would be clipped otherwise, and a schedule would go on after each slot."""


@cache
def alone() -> LoopRun:
    """By elastic.steps."""
    return run_loop(1, **HARD)


def assert_as_alone(run: LoopRun) -> None:
    assert run.abort_reason == ""
    for rank, weights in run.weights.items():
        assert weights.equal(alone().weights[0]), rank
        assert (run.steps[rank], run.rates[rank]) == (6, 0.1 * 0.5**3)
        done = run.done.get(rank, [])
        assert done == list(range(7 - len(done), 7)), "what is to run once a step has run more often, or not at all"
    assert sum(len(run.done.get(rank, ())) == 6 for rank in run.weights) >= 1


def run_plain(num_workers: int, **spec: Any) -> LoopRun:
    return run_loop(num_workers, is_plain_loop=True, **{**HARD, **spec})


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_any_number_of_workers_gives_the_bits_of_an_inner_loop(num_workers: int) -> None:
    """Steps of four slots, the last of an epoch of two: some workers have none, and compute another one's, a ghost."""
    run = run_plain(num_workers)
    assert_as_alone(run)
    assert len(run.weights) == num_workers
    given = Counter(sample for slots in run.computed.values() for _, samples in slots for sample in samples)
    assert set(given.values()) == {2} if num_workers <= 2 else {2} < set(given.values())


@pytest.mark.sample(14)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("call", range(1, NUM_CALLS + 1))
def test_a_death_at_any_call_changes_no_bit(rank: int, call: int) -> None:
    run = run_plain(3, deaths={rank: call})
    assert_as_alone(run)
    assert set(run.weights) == {0, 1, 2} - {rank}
    assert run.num_changes == 1


@pytest.mark.sample(6)
@pytest.mark.parametrize("first", range(1, NUM_CALLS, 2))
@pytest.mark.parametrize("second", range(2, NUM_CALLS + 6, 4))
def test_two_deaths_and_a_return_change_no_bit(first: int, second: int) -> None:
    run = run_plain(4, deaths={1: first, 0: second}, joins=[3])
    assert_as_alone(run)
    assert {2, 3} <= set(run.weights)


@pytest.mark.sample(6)
@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("call", range(4, NUM_CALLS + 4))
def test_a_death_while_others_join_changes_no_bit(source: int, call: int) -> None:
    run = run_plain(3, deaths={source: call}, joins=[2, 3], max_workers=5)
    assert_as_alone(run)
    assert {3, 4} & set(run.weights), "the test does not show what it should"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [1, 3, 6])
@pytest.mark.parametrize("joins", [(), (3,)])
def test_a_worker_that_misses_an_entry_completes_the_step(rank: int, step: int, joins: tuple[int, ...]) -> None:
    run = run_plain(3, misses={rank: step}, joins=joins, max_workers=4)
    assert_as_alone(run)
    assert {0, 1, 2} <= set(run.weights)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_leaves_hands_its_slots_over(rank: int) -> None:
    run = run_plain(3, drains={rank: 2})
    assert_as_alone(run)
    assert set(run.weights) == {0, 1, 2} - {rank}


def test_a_stop_ends_all_loops_after_the_same_step() -> None:
    assert run_plain(3, stop_at=3).steps == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("call", [5, 6, 9])
def test_float_sums_are_close(call: int) -> None:
    run = run_plain(3, sums="float", deaths={1: call})
    for weights in run.weights.values():
        assert weights.equal(run.weights[0])
        torch.testing.assert_close(weights, alone().weights[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch_size, slot_size", [(7, 3), (8, 8), (5, 2), (20, 6)])
@pytest.mark.parametrize("deaths", [{}, {1: 6}])
def test_slots_that_are_smaller_than_a_batch(batch_size: int, slot_size: int, deaths: dict[int, int]) -> None:
    """Slots of a step are as equal as can be: 7 are 2, 2 and 3. The last step of an epoch is smaller."""
    sampler = dict(batch_size=batch_size, slot_size=slot_size)
    right, run = run_loop(1, sampler=sampler), run_loop(3, is_plain_loop=True, sampler=sampler, deaths=deaths)
    assert len(run.weights) == 3 - len(deaths)
    assert all(weights.equal(right.weights[0]) for weights in run.weights.values())
    assert {run.steps[rank] for rank in run.weights} == {right.steps[0]}


def test_a_schedule_that_goes_on_once_an_epoch() -> None:
    """Made after the optimizer's step() has been replaced, which it wraps once more."""
    run = run_loop(3, is_plain_loop=True, schedule="epochs", deaths={1: 6})
    assert run.rates == {0: 0.025, 2: 0.025}


def test_an_optimizer_counts_steps_and_not_slots() -> None:
    def work(rank: int, world: ThreadWorld) -> None:
        loops = LoopWorld(LoopSpec(num_workers=1))
        CURRENT.set(loops.open_session(0))
        network = make_model()
        optimizer = torch.optim.AdamW(network.parameters())
        model = DataParallel(network, optimizer)
        sampler = Sampler(Numbers(8), batch_size=8, slot_size=2)
        for _, x, _ in DataLoader(sampler.dataset, 2, sampler=sampler):  # type: ignore[arg-type]
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        assert [int(state["step"]) for state in optimizer.state.values()] == [1] * 4

    run_threads(1, work)


Average = torch.optim.swa_utils.AveragedModel


Scaled = tuple[torch.Tensor, torch.Tensor, float]
"""Weights, their average, and the scale of the losses."""


def train_scaled(num_workers: int, kind: str, deaths: dict[int, int]) -> dict[int, Scaled]:
    """Two epochs of three steps; what each worker has at the end."""
    loops = LoopWorld(LoopSpec(num_workers=num_workers, deaths=deaths))
    found: dict[int, Scaled] = {}

    def work(rank: int, world: ThreadWorld) -> None:
        CURRENT.set(session := loops.open_session(rank))
        network = make_model()
        optimizer, average = torch.optim.SGD(network.parameters(), lr=0.1), Average(network)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        model = DataParallel(network, optimizer, scaler, average, sums="exact")
        sampler = Sampler(Numbers(), batch_size=8, slot_size=2)

        def backward(x: torch.Tensor, y: torch.Tensor) -> None:
            scaler.scale((model(x).squeeze(1) - y).square().mean()).backward()

        def update() -> None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(network)

        try:
            if kind == "plain":
                loader: DataLoader[Any] = DataLoader(sampler.dataset, 2, sampler=sampler)  # type: ignore[arg-type]
                for _ in range(2):
                    for _, x, y in loader:
                        backward(x, y)
                        update()
            else:
                for step in steps(sampler, epochs=2):
                    for _, x, y in step:
                        backward(x, y)
                    update()
            session.end()
        except RankDied:
            loops.coordinator.on_lost(rank, "died")
            raise
        weights, mean = (torch.cat([p.detach().view(-1) for p in each.parameters()]) for each in (network, average))
        assert int(average.n_averaged) == 6
        found[rank] = weights, mean, scaler.get_scale()

    run_threads(num_workers, work, world=loops.world)
    return found


@pytest.mark.parametrize("call", [3, 6, 9])
def test_a_scaler_and_an_average_of_weights_go_on_once_a_step(call: int) -> None:
    right, found = train_scaled(1, "steps", {})[0], train_scaled(3, "plain", {1: call})
    assert set(found) == {0, 2}
    assert right[2] == 4.0 * 2**3
    for weights, average, scale in found.values():
        assert weights.equal(right[0]) and average.equal(right[1]) and scale == right[2]


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size, message", [(1, "is smaller than slot_size"), (3, "before the last one is done")])
def test_a_batch_that_is_not_a_slot_is_refused(batch_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_plain(1, loader_batch_size=batch_size)


@pytest.mark.parametrize(
    "mistake, message", [("closure", EARLY_UPDATE), ("schedule first", EARLY_UPDATE), ("two passes", OUTSIDE)]
)
def test_what_a_slot_has_no_place_for_is_refused(mistake: str, message: str) -> None:
    def work(rank: int, world: ThreadWorld) -> None:
        CURRENT.set(LoopWorld(LoopSpec(num_workers=1)).open_session(0))
        network = make_model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model = DataParallel(network, optimizer, schedule)
        sampler = Sampler(Numbers(8), batch_size=8, slot_size=2)
        for _, x, _ in DataLoader(sampler.dataset, 2, sampler=sampler):  # type: ignore[arg-type]
            if mistake == "closure":
                optimizer.step(lambda x=x: model(x).sum())
            elif mistake == "schedule first":
                schedule.step()
            model(x).sum().backward()
            model(x).sum().backward()

    with pytest.raises(UserError) as error:
        run_threads(1, work)
    assert str(error.value) == message


@pytest.mark.parametrize("on_failure", ["redo", "drop"])
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_of_several_steps_are_not_lost_without_a_word(on_failure: str, every: int) -> None:
    def work(rank: int, world: ThreadWorld) -> None:
        CURRENT.set(LoopWorld(LoopSpec(num_workers=1)).open_session(0))
        network = make_model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        model = DataParallel(network, optimizer)
        options: dict[str, Any] = {"batch_size": 2} if on_failure == "redo" else {"on_failure": "drop"}
        sampler = Sampler(Numbers(8), slot_size=2, **options)
        loader: DataLoader[Any] = DataLoader(sampler.dataset, 2, sampler=sampler)  # type: ignore[arg-type]
        for index, (_, x, _) in enumerate(loader):
            model(x).sum().backward()
            if index % every == every - 1:
                optimizer.step()

    if every == 1:
        run_threads(1, work)
        return
    with pytest.warns(UserWarning) as found:
        run_threads(1, work)
    assert {str(each.message) for each in found} == {NO_UPDATE}


@pytest.mark.parametrize("num_batches, is_refused", [(1, True), (2, False), (3, True)])
def test_a_loop_that_is_left_within_a_step_is_an_error(num_batches: int, is_refused: bool) -> None:
    """Steps of two slots for each of two workers, one of which leaves."""
    loops = LoopWorld(LoopSpec(num_workers=2))

    def work(rank: int, world: ThreadWorld) -> None:
        CURRENT.set(session := loops.open_session(rank))
        network = make_model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        model = DataParallel(network, optimizer)
        sampler = Sampler(Numbers(16), batch_size=8, slot_size=2)
        loader: DataLoader[Any] = DataLoader(sampler.dataset, 2, sampler=sampler)  # type: ignore[arg-type]
        limit = 4 if is_refused and rank == 1 else num_batches
        for _, (_, x, _) in zip(range(limit), loader):
            model(x).sum().backward()
            optimizer.step()
        session.end()

    if is_refused:
        with pytest.raises(UserError, match="left within a step"):
            run_threads(2, work, world=loops.world)
    else:
        run_threads(2, work, world=loops.world)
