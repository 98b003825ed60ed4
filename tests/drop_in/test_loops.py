"""Elastic loops in threads: deaths at every communication call, returns, drains; bitwise the undisturbed run."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from parallel3d.elastic.drop_in.elastic_loop import CURRENT, DataParallel, Sampler, steps
from parallel3d.errors import UserError
from parallel3d.inprocess.world import ThreadWorld, run_threads
from tests.support.loop_threads import NUM_SAMPLES, LoopRun, LoopSpec, LoopWorld, Numbers, make_model, run_loop

DROP: dict[str, Any] = dict(is_plain_loop=True, sampler=dict(batch_size=None, on_failure="drop"))
NUM_CALLS = 14
"""Communication calls of one of three workers: one or two with the state, then two a step."""


@cache
def alone() -> LoopRun:
    return run_loop(1)


def assert_as_alone(run: LoopRun) -> None:
    assert run.abort_reason == ""
    assert run.losses == alone().losses
    assert all(weights.equal(alone().weights[0]) for weights in run.weights.values())


def test_any_number_of_workers_gives_the_same_bits() -> None:
    assert len(alone().losses) == 6
    for num_workers in (2, 3, 5):
        run = run_loop(num_workers)
        assert_as_alone(run)
        assert len(run.weights) == num_workers
    assert run_loop(2, sums="float").losses != alone().losses, "the exact sums have no effect"


@pytest.mark.sample(6)
@pytest.mark.parametrize("is_plain_loop", [False, True])
@pytest.mark.parametrize("call", range(1, NUM_CALLS + 1))
def test_float_sums_are_close(call: int, is_plain_loop: bool) -> None:
    run = run_loop(3, sums="float", deaths={1: call}, **(DROP if is_plain_loop else {}))
    assert {0, 2} <= set(run.weights)
    for weights in run.weights.values():
        assert weights.equal(run.weights[0])
        if not is_plain_loop:
            torch.testing.assert_close(weights, alone().weights[0], rtol=0, atol=1e-6)


@pytest.mark.sample(14)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("call", range(1, NUM_CALLS + 1))
def test_a_death_at_any_call_changes_no_bit(rank: int, call: int) -> None:
    run = run_loop(3, deaths={rank: call})
    assert_as_alone(run)
    assert set(run.weights) == {0, 1, 2} - {rank}
    assert run.num_changes == 1


@pytest.mark.sample(8)
@pytest.mark.parametrize("first", range(1, NUM_CALLS, 2))
@pytest.mark.parametrize("second", range(2, NUM_CALLS + 6, 2))
def test_two_deaths_and_a_return_change_no_bit(first: int, second: int) -> None:
    run = run_loop(4, deaths={1: first, 0: second}, joins=[3])
    assert_as_alone(run)
    assert {2, 3} <= set(run.weights)
    assert run.num_changes >= 2 - (0 in run.weights)


@pytest.mark.sample(8)
@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("call", range(4, NUM_CALLS + 4))
def test_a_death_while_others_join_changes_no_bit(source: int, call: int) -> None:
    run = run_loop(3, deaths={source: call}, joins=[2, 3], max_workers=5)
    assert_as_alone(run)
    joined = {3, 4} & set(run.weights)
    assert joined, "the test does not show what it should"
    assert any(len(run.computed.get(rank, ())) for rank in joined)


@pytest.mark.parametrize("call", range(1, 8))
def test_a_joiner_may_die_at_any_call(call: int) -> None:
    run = run_loop(2, joins=[2], max_workers=3, deaths={2: call})
    assert_as_alone(run)
    assert {0, 1} <= set(run.weights)


def test_no_sample_is_lost_or_trained_twice() -> None:
    run = run_loop(3, deaths={1: 7})
    steps_of = {step for given in run.computed.values() for step, _ in given}
    for step in steps_of:
        survivors = Counter(s for rank in (0, 2) for at, given in run.computed[rank] if at == step for s in given)
        assert set(survivors.values()) <= {1}
        if step > 3:  # the dead one had its last in step 3
            whole = {sample for at, given in alone().computed[0] if at == step for sample in given}
            assert set(survivors) == whole


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_leaves_hands_its_slots_over(rank: int) -> None:
    run = run_loop(3, drains={rank: 2})
    assert_as_alone(run)
    assert set(run.weights) == {0, 1, 2} - {rank}


def test_a_stop_ends_all_loops_after_the_same_step() -> None:
    run = run_loop(3, stop_at=3)
    assert run.steps == {0: 3, 1: 3, 2: 3}
    assert run.losses == {step: alone().losses[step] for step in (1, 2, 3)}


@pytest.mark.parametrize("joins", [(), (3,)])
def test_a_loop_that_is_left_early_ends_on_all_workers(joins: tuple[int, ...]) -> None:
    run = run_loop(2, break_at=3, joins=joins, max_workers=3)
    assert {0: 2, 1: 2}.items() <= run.steps.items() <= {0: 2, 1: 2, 2: 2}.items()


@pytest.mark.sample(4)
@pytest.mark.parametrize("call", range(1, NUM_CALLS + 1))
def test_a_new_leader_publishes_the_steps_that_the_lost_one_may_not_have(call: int) -> None:
    run = run_loop(3, deaths={0: call})
    published = run.published[1]
    assert [record["step"] for record in published] == [1, 2, 3, 4, 5, 6]
    assert {record["step"]: record["loss"] for record in published} == alone().losses


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [1, 3, 6])
@pytest.mark.parametrize("joins", [(), (3,)])
def test_a_worker_that_misses_an_entry_completes_the_step(rank: int, step: int, joins: tuple[int, ...]) -> None:
    run = run_loop(3, misses={rank: step}, joins=joins, max_workers=4)
    assert_as_alone(run)
    assert {0, 1, 2} <= set(run.weights)
    assert {record["step"] for record in run.published[0]} == {1, 2, 3, 4, 5, 6}


def test_each_slot_has_random_numbers_of_its_own() -> None:
    draws = run_loop(1).draws
    assert len(set(draws)) == len(draws) == 20
    assert run_loop(1).draws == draws


# --- the plain loop, whose lost samples return later ----------------------------------------------------------------


def test_the_plain_loop_deals_every_sample_once_an_epoch() -> None:
    run = run_loop(3, **DROP)
    given = Counter(sample for slots in run.computed.values() for _, samples in slots for sample in samples)
    ghosts = sum(given.values()) - 2 * NUM_SAMPLES
    assert min(given.values()) == 2
    assert ghosts == 2 * 2, "the last step of an epoch has two samples, and a third worker, with a batch that is full"
    assert run.steps == {0: 8, 1: 8, 2: 8}
    assert run.weights[0].equal(run.weights[1]) and run.weights[0].equal(run.weights[2])


@pytest.mark.sample(10)
@pytest.mark.parametrize("joins", [(), (2,), (4,)])
@pytest.mark.parametrize("call", range(1, NUM_CALLS + 1))
def test_the_plain_loop_goes_on_after_a_death_at_any_call(call: int, joins: tuple[int, ...]) -> None:
    run = run_loop(3, deaths={1: call}, joins=joins, **DROP)
    assert run.abort_reason == ""
    assert {0, 2} <= set(run.weights)
    first = run.weights[0]
    assert all(weights.equal(first) for weights in run.weights.values())
    assert len(set(run.steps.values())) == 1


def test_the_plain_loop_trains_as_one_process_on_the_same_steps() -> None:
    """Without shuffling a step of three workers is one slice of the dataset; the last one of an epoch has two samples,
    of two workers: the third takes part with none."""
    numbers, model = Numbers(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for x, y in zip(numbers.x.split(6), numbers.y.split(6)):
            optimizer.zero_grad()
            (model(x).squeeze(1) - y).square().mean().backward()
            optimizer.step()
    whole = torch.cat([each.detach().view(-1) for each in model.parameters()])
    run = run_loop(3, is_plain_loop=True, sampler=dict(batch_size=None, on_failure="drop", shuffle=False))
    for weights in run.weights.values():
        torch.testing.assert_close(weights, whole, rtol=0, atol=1e-6)


def replay(steps_given: list[list[int]], num_samples: int) -> torch.Tensor:
    """The weights of one process that makes the optimizer's step for the mean over each step's samples."""
    numbers, model = Numbers(num_samples, torch.float64), make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for given in steps_given:
        optimizer.zero_grad()
        (model(numbers.x[given]).squeeze(1) - numbers.y[given]).square().mean().backward()
        optimizer.step()
    return torch.cat([each.detach().view(-1) for each in model.parameters()])


@pytest.mark.sample(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", range(3, NUM_CALLS + 1))
def test_the_plain_loop_trains_on_what_a_loss_has_left(call: int, rank: int) -> None:
    """As one process on the samples of the committed steps: the mean over those that the survivors have. Slots of 2,
    of 3 workers, then of 2; 24 samples, so that all have some in every step. float64: 1e-12 is the order of sums."""
    options: dict[str, Any] = dict(num_samples=24, sums="float", dtype=torch.float64)
    run = run_loop(3, deaths={rank: call}, **options, **DROP)
    by_step: dict[int, dict[int, tuple[int, ...]]] = {}
    for worker, given in run.computed.items():
        for step, samples in given:
            by_step.setdefault(step, {})[worker] = samples
    died_in, last = run.computed[rank][-1]
    assert len(last) == 2 and {len(by_step[step]) for step in range(1, died_in + 1)} == {3}
    del by_step[died_in][rank]
    kept = [sum(by_step[step].values(), ()) for step in sorted(by_step)]
    published = {record["step"]: record["num_samples"] for records in run.published.values() for record in records}
    counts = [published[step] for step in sorted(by_step)]
    assert counts == [len(samples) for samples in kept]
    assert counts[:died_in] == [6] * (died_in - 1) + [6 - len(last)]
    lost = last if died_in > 4 else ()  # in the last epoch, whose dropped samples return no more
    assert Counter(sum(kept, ())) + Counter(lost) == Counter([*range(24)] * 2)
    for weights in run.weights.values():
        torch.testing.assert_close(weights, replay([list(samples) for samples in kept], 24), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_samples", [17, 20, 23])
def test_slots_that_are_smaller_than_a_batch_end_an_epoch(num_samples: int) -> None:
    """Three workers have slots of at most 4. The last steps are 1 + 2 + 2, 2 + 3 + 3 and 3 + 4 + 4."""
    options = dict(batch_size=None, on_failure="drop", slot_size=4)
    run = run_loop(3, is_plain_loop=True, num_samples=num_samples, sampler=options)
    given = Counter(sample for slots in run.computed.values() for _, samples in slots for sample in samples)
    assert given == Counter({sample: 2 for sample in range(num_samples)})
    assert run.steps == {0: 4, 1: 4, 2: 4}


def test_the_length_of_a_loader_is_the_steps_of_an_epoch() -> None:
    assert run_loop(3, **DROP).lengths == {rank: ["unknown", 4] for rank in range(3)}


@pytest.mark.parametrize("batch_size, message", [(1, "is smaller than slot_size"), (3, "before the last one is done")])
def test_a_batch_that_is_not_a_slot_is_refused(batch_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_loop(1, loader_batch_size=batch_size, **DROP)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [2, 4, 5, 8])
@pytest.mark.parametrize("is_joined", [False, True])
def test_a_plain_loop_completes_a_step_whose_entry_it_missed(rank: int, step: int, is_joined: bool) -> None:
    """Of step 4, the last of its epoch, one that joins may only have the optimizer's step left; so it may of step 5, in
    an epoch that it passes over first. After step 8 some are at the end of their scripts."""
    run = run_loop(3, misses={rank: step}, joins=(step,) if is_joined else (), max_workers=4, **DROP)
    assert run.abort_reason == ""
    assert {0, 1, 2} <= set(run.weights)
    assert (3 in run.weights) == is_joined or step == 8
    assert all(weights.equal(run.weights[0]) for weights in run.weights.values())
    assert len(set(run.steps.values())) == 1


def test_a_stop_ends_plain_loops_in_all_their_epochs() -> None:
    assert run_loop(3, stop_at=3, **DROP).steps == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("step", [3, 4])
def test_a_worker_leaves_a_plain_loop_in_one_change(step: int) -> None:
    """Step 4 is the last of its epoch: its boundary is passed twice."""
    run = run_loop(3, drains={1: step}, **DROP)
    assert set(run.weights) == {0, 2} and run.num_changes == 1


def test_a_dropped_sample_comes_back_in_the_next_epoch() -> None:
    run = run_loop(3, deaths={1: 6}, **DROP)
    last = run.computed[1][-1]
    survivors = Counter(s for rank in (0, 2) for _, samples in run.computed[rank] for s in samples)
    dead = Counter(s for _, samples in run.computed[1][:-1] for s in samples)
    assert all((survivors + dead)[sample] >= 2 for sample in range(NUM_SAMPLES)), last


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match="call elastic.init"):
        DataParallel(model, optimizer)
    with pytest.raises(UserError, match="the optimizer's state"):
        DataParallel(model)
    with pytest.raises(UserError, match="call elastic.init"):
        next(steps(Sampler(range(8), batch_size=4, slot_size=2)))
    with pytest.raises(UserError, match="needs a batch_size"):
        Sampler(range(8), slot_size=2)
    with pytest.raises(UserError, match="needs a batch_size"):
        Sampler(range(8), slot_size=2, batch_size=4, on_failure="drop")
    with pytest.raises(UserError, match="at least 1"):
        Sampler([], slot_size=2, batch_size=4)


def test_no_sync_is_refused() -> None:
    def work(rank: int, world: ThreadWorld) -> None:
        network = make_model()
        CURRENT.set(LoopWorld(LoopSpec(num_workers=1)).open_session(0))
        with pytest.raises(UserError, match="batch_size of several slots"):
            DataParallel(network, torch.optim.SGD(network.parameters())).no_sync()

    run_threads(1, work)
