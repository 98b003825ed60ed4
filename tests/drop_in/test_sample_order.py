"""Samples, their owners, and what becomes of those of lost workers: over all histories of shrinking and joining."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.drop_in.progress import Progress, StepEntry
from parallel3d.elastic.drop_in.sample_order import DROPPED, SampleOrder, SampleState
from parallel3d.errors import ProtocolError
from parallel3d.precision.fixed_point import ExactSum

MAX_WORKERS = 7


@dataclass(frozen=True)
class Change:
    """A change of membership in the middle of a step."""

    lost: frozenset[int]
    """Places among the workers."""
    kept: int
    """Index, modulo the number of workers, of a worker that always survives the change."""
    joined: int


History = list[list[Change]]
"""The changes of each step, in turn: after the last come the first again, so that there are some until the run ends."""

CHANGES = st.builds(
    Change,
    st.frozensets(st.integers(0, MAX_WORKERS - 1)),
    st.integers(0, MAX_WORKERS - 1),
    st.integers(0, 3),
)
HISTORIES = st.lists(st.just([]) | st.lists(CHANGES, max_size=3), min_size=1, max_size=12)
ORDERS = st.builds(
    lambda num_samples, slot_size, slots, seed: SampleOrder(
        num_samples=num_samples, slot_size=slot_size, batch_size=slots and slots * slot_size, seed=seed
    ),
    st.integers(1, 40),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
    st.integers(0, 3),
)


@dataclass
class Account:
    """What a run has trained on, and left out, by epoch."""

    trained: dict[int, Counter]
    dropped: dict[int, Counter]
    steps: list[tuple[int, ...]]


def change_workers(workers: tuple[int, ...], change: Change, new: Iterator[int]) -> tuple[int, ...]:
    """The workers after a change, ascending and at most `MAX_WORKERS`. Numbers are never used again."""
    kept = change.kept % len(workers)
    after = [worker for place, worker in enumerate(workers) if place == kept or place not in change.lost]
    return (*after, *islice(new, min(change.joined, MAX_WORKERS - len(after))))


def run_history(order: SampleOrder, num_workers: int, history: History, num_epochs: int = 3) -> Account:
    """Trains for some epochs. All of a step's changes come before its commit; a worker always remains."""
    workers, new = tuple(range(num_workers)), count(num_workers)
    state, account = order.begin(workers), Account({}, {}, [])
    while state.epoch < num_epochs:
        for change in history[state.step % len(history)]:
            workers = change_workers(workers, change, new)
            state = order.change_workers(state, workers)
        slots = [slot for slot, owner in enumerate(state.owners) if owner != DROPPED]
        assert {state.owners[slot] for slot in slots} <= set(workers)
        used = [sample for slot in slots for sample in order.samples(state, slot)]
        gone = [slot for slot, owner in enumerate(state.owners) if owner == DROPPED]
        left_out = [sample for slot in gone for sample in order.samples(state, slot)]
        assert len(used) == order.num_used(state)
        assert len(used) + len(left_out) == state.size
        account.trained.setdefault(state.epoch, Counter()).update(used)
        account.dropped.setdefault(state.epoch, Counter()).update(left_out)
        assert Counter(state.dropped) == account.dropped[state.epoch]
        account.steps.append(tuple(used))
        state = order.advance(state, workers)
    return account


@given(ORDERS, st.integers(1, 5), HISTORIES)
def test_each_epoch_is_the_dataset_without_what_it_dropped(
    order: SampleOrder, num_workers: int, history: History
) -> None:
    account = run_history(order, num_workers, history)
    whole = Counter(range(order.num_samples))
    returned = Counter[int]()
    for epoch in range(3):
        assert account.trained[epoch] + account.dropped[epoch] == whole + returned
        returned = account.dropped[epoch]
        if order.batch_size is not None:
            assert not returned


@given(ORDERS, st.integers(1, 5), HISTORIES)
def test_redo_makes_the_same_steps_with_any_workers(
    order: SampleOrder, num_workers: int, history: History
) -> None:
    if order.batch_size is not None:
        assert run_history(order, num_workers, history).steps == run_history(order, 1, [[]]).steps


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 6))
def test_workers_of_drop_mode_never_have_more_than_their_slot(num_samples: int, slot_size: int, workers: int) -> None:
    order = SampleOrder(num_samples=num_samples, slot_size=slot_size)
    state = order.begin(range(workers))
    sizes = [order.num_samples_of(state, slot) for slot in range(len(state.owners))]
    assert sum(sizes) == min(num_samples, slot_size * workers)
    assert max(sizes) <= slot_size and max(sizes) - min(sizes) <= 1
    assert len(set(state.owners)) == len(state.owners)


def test_lost_slots_go_to_those_with_the_fewest() -> None:
    order = SampleOrder(num_samples=100, slot_size=1, batch_size=7)
    state = order.begin([0, 1, 2, 3])
    assert state.owners == (0, 1, 2, 3, 0, 1, 2)
    assert order.change_workers(state, (0, 1, 2, 5)).owners == (0, 1, 2, 5, 0, 1, 2)
    assert order.change_workers(state, (1, 3)).owners == (3, 1, 1, 3, 3, 1, 1)


def test_epochs_and_seeds_are_in_different_orders() -> None:
    orders = []
    for seed in (0, 1):
        order = SampleOrder(num_samples=30, slot_size=30, batch_size=30, seed=seed)
        state = order.begin([0])
        orders += [order.samples(state, 0), order.samples(order.advance(state, [0]), 0)]
    assert len(set(orders)) == 4 and all(sorted(each) == list(range(30)) for each in orders)
    assert SampleOrder(num_samples=4, slot_size=4, shuffle=False).samples(SampleState(size=4, owners=(0,)), 0) == (
        *range(4),
    )


def test_an_entry_is_applied_once_and_must_count_each_sample() -> None:
    order = SampleOrder(num_samples=10, slot_size=2, batch_size=4)
    progress = Progress(samples=order.begin([0, 1]))
    entry = StepEntry(step=1, num_workers=2, num_samples=4, loss=ExactSum.of([2.0, 0.5]))
    after = progress.apply(entry, order, [0, 1])
    assert after.position == 1 and after.samples.offset == 4
    assert after.apply(entry, order, [0, 1]) is after
    assert StepEntry.decode(entry.encode()) == entry
    assert Progress.from_json(after.to_json()) == after
    with pytest.raises(ProtocolError, match="step 1 has 4 samples"):
        progress.apply(StepEntry(step=1, num_workers=2, num_samples=6), order, [0, 1])


def test_entries_add_up() -> None:
    parts = [StepEntry(step=3, epoch=1, num_samples=n, leave=n == 2, loss=ExactSum.of([0.1 * n])) for n in (2, 3)]
    floats = [a + b for a, b in zip(*(part.to_floats() for part in parts))]
    whole = StepEntry.from_floats(3, 1, floats)
    assert (whole.num_workers, whole.num_samples, whole.leave, whole.stop) == (2, 5, 1, 0)
    assert whole.loss == parts[0].loss + parts[1].loss
