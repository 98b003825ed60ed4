"""Entries: exact on every way they travel; the state that is a fold over them."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.errors import ProtocolError
from parallel3d.optim.state_norms import StateNorms
from parallel3d.precision.fixed_point import ExactSum
from parallel3d.trainer.entry import Contribution, Entry, EvaluationEntry, entry_from_json
from parallel3d.trainer.entry_layout import EntryLayout
from parallel3d.trainer.state import TrainState

LAYOUT = EntryLayout(num_stages=2, num_micro_batches=3, num_slots=4, cursor_size=5)
BACKWARD_COUNTS = {(stage, micro_batch): 1 for stage in range(2) for micro_batch in range(3)}

cursors = st.tuples(*[st.integers(0, 2**40)] * 5)
entries = st.builds(
    Entry,
    iteration=st.integers(1, 2**40),
    squared_norm=st.floats(0, allow_infinity=False),
    finite=st.booleans(),
    num_target_tokens=st.integers(1, 2**50),
    loss_sum=st.floats(),
    stop=st.booleans(),
    leave=st.booleans(),
    cursors=st.lists(cursors, max_size=5).map(tuple),
    evaluate=st.booleans(),
    param_norm=st.none() | st.floats(0),
    variance_norm=st.none() | st.floats(0),
    variance_max=st.none() | st.floats(0),
)
evaluations = st.builds(EvaluationEntry, iteration=st.integers(1, 2**40), loss=st.none() | st.floats())


def bits(value):
    """What equality forgets: the sign of zero, and that a NaN is a NaN."""
    return value.hex() if isinstance(value, float) else value


def entry(iteration, **fields):
    plain = dict(squared_norm=4.0, finite=True, num_target_tokens=10, loss_sum=25.0, stop=False, leave=False)
    return Entry(iteration=iteration, cursors=((0, iteration, 0),), **{**plain, **fields})


# --- on the wire ------------------------------------------------------------------------------------------------------


@given(entries | evaluations)
def test_json_keeps_every_bit(sent):
    got = entry_from_json(json.loads(json.dumps(sent.to_json())))
    assert type(got) is type(sent)
    for name in sent.__dataclass_fields__:
        assert bits(getattr(got, name)) == bits(getattr(sent, name)), name


@given(
    st.lists(cursors, min_size=4, max_size=4),
    st.floats(2**-52, 1e25),
    st.floats(2**-52, 1e25),
    st.integers(1, 2**40),
    st.booleans(),
    st.booleans(),
    st.permutations(range(3)),
)
def test_the_sum_of_the_vectors_is_the_entry(positions, squared_norm, loss_sum, num_tokens, stop, leave, order):
    """Every rank adds its part; the order of the adds changes no bit of any of them."""
    parts = [
        Contribution(
            squared_norm=ExactSum.of([squared_norm]),
            num_target_tokens=num_tokens,
            cursors=dict(enumerate(positions[:3])),
            backward_counts={(0, m): 1 for m in range(3)},
            stop=stop,
        ),
        Contribution(loss_sum=ExactSum.of([loss_sum, 0.5]), backward_counts={(1, m): 1 for m in range(2)}, leave=leave),
        Contribution(loss_sum=ExactSum.of([-0.5]), cursors={3: positions[3]}, backward_counts={(1, 2): 1}),
    ]
    total = [0.0] * LAYOUT.size
    for number in order:
        total = [a + b for a, b in zip(total, LAYOUT.pack(parts[number]))]
    assert LAYOUT.unpack(7, total) == Entry(
        iteration=7,
        squared_norm=squared_norm,
        finite=True,
        num_target_tokens=num_tokens,
        loss_sum=loss_sum,
        stop=stop,
        leave=leave,
        cursors=tuple(positions),
    )


@pytest.mark.parametrize("count", [0, 2])
def test_a_micro_batch_that_is_not_counted_once_is_no_entry(count):
    vector = LAYOUT.pack(Contribution(num_target_tokens=1, backward_counts={**BACKWARD_COUNTS, (1, 2): count}))
    with pytest.raises(ProtocolError, match=f"iteration 9: micro-batch 2 counted {count} times at stage 1"):
        LAYOUT.unpack(9, vector)


@pytest.mark.parametrize(
    "part",
    [
        dict(squared_norm=ExactSum.of([float("inf")])),
        dict(squared_norm=ExactSum.of([float("nan")])),
        dict(loss_sum=ExactSum.of([float("nan")])),
        dict(is_finite=False),
    ],
)
def test_one_rank_that_is_not_finite_is_enough(part):
    ranks = [Contribution(num_target_tokens=1, backward_counts=BACKWARD_COUNTS), Contribution(**part), Contribution()]
    found = LAYOUT.unpack(1, [sum(values) for values in zip(*map(LAYOUT.pack, ranks))])
    assert not found.finite and found.squared_norm == 0.0


@given(
    st.lists(st.none() | st.tuples(*[st.floats(2**-40, 1e20)] * 3), min_size=5, max_size=5),
    st.permutations(range(5)),
)
def test_norms_are_those_of_all_ranks_that_have_measured(measured, order):
    """Sums are exact in any order; of the largest each rank has a slot of its own."""
    layout = replace(LAYOUT, num_ranks=5)
    norms = [
        values
        and StateNorms(
            squared_weights=ExactSum.of([values[0]]), variance=ExactSum.of([values[1]]), variance_max=values[2]
        )
        for values in measured
    ]
    backward_counts = Contribution(num_target_tokens=1, backward_counts=BACKWARD_COUNTS)
    vectors = [
        layout.pack(backward_counts),
        *(layout.pack(Contribution(norms=norms[rank], rank=rank)) for rank in order),
    ]
    found = layout.unpack(1, [sum(values) for values in zip(*vectors)])
    known = [values for values in measured if values is not None]
    if not known:
        assert (found.param_norm, found.variance_norm, found.variance_max) == (None, None, None)
        return
    squares, sums, largest = zip(*known)
    assert found.param_norm == math.sqrt(ExactSum.of(squares).value)
    assert (found.variance_norm, found.variance_max) == (ExactSum.of(sums).value, max(largest))


def test_a_weight_that_is_no_number_shows():
    layout = replace(LAYOUT, num_ranks=2)
    broken = StateNorms(
        squared_weights=ExactSum.of([math.nan]), variance=ExactSum.of([math.inf]), variance_max=math.nan
    )
    vectors = [
        layout.pack(
            Contribution(num_target_tokens=1, backward_counts=BACKWARD_COUNTS, norms=StateNorms(variance_max=3.0))
        ),
        layout.pack(Contribution(norms=broken, rank=1)),
    ]
    found = layout.unpack(1, [sum(values) for values in zip(*vectors)])
    assert math.isnan(found.param_norm) and math.isinf(found.variance_norm) and math.isnan(found.variance_max)


def test_the_gradient_is_scaled_to_the_mean_and_clipped():
    plain = entry(1)  # norm 2 of the sum, 0.2 of the mean of 10 tokens
    assert plain.loss == 2.5 and plain.grad_norm == pytest.approx(0.2)
    assert plain.grad_scale(None) == plain.grad_scale(1.0) == 0.1
    assert plain.grad_scale(0.05) == pytest.approx(0.1 * 0.05 / 0.2, rel=1e-4)


# --- the fold ---------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw):
    """Entries 1, 2, ... with evaluations in between, as a run makes them."""
    history = []
    for number in range(1, draw(st.integers(2, 8))):
        tokens = draw(st.integers(1, 1000))
        history.append(entry(number, finite=draw(st.booleans()), num_target_tokens=tokens))
        if draw(st.booleans()):
            history.append(EvaluationEntry(iteration=number, loss=float(number)))
    return history


def apply(history):
    state = TrainState(cursors=((0, 0, 0),))
    for each in history:
        state = state.apply(each)
    return state


@given(histories(), st.data())
def test_whatever_was_folded_already_changes_nothing(history, data):
    """Each entry again, at any later point: what a record brings to those who have it."""
    state = TrainState(cursors=((0, 0, 0),))
    for number, each in enumerate(history):
        state = state.apply(each)
        again = data.draw(st.sampled_from(history[: number + 1]))
        assert state.apply(again) == state
    assert state == apply(history)


@given(histories())
def test_the_state_counts_what_the_entries_say(history):
    state, steps = apply(history), [each for each in history if isinstance(each, Entry)]
    assert state.iteration == len(steps) and state.entries == tuple(steps[-2:])
    assert state.num_updates == sum(each.finite for each in steps)
    assert state.tokens_read == state.tokens_seen == sum(each.num_target_tokens for each in steps)
    assert state.tokens_trained == sum(each.num_target_tokens for each in steps if each.finite)
    assert state.cursors == steps[-1].cursors
    assert state.is_evaluated == isinstance(history[-1], EvaluationEntry)


@given(histories(), st.integers(0, 1))
def test_the_newest_entries_bring_whoever_is_one_behind_up(history, num_behind):
    """One step and its evaluation are what a rank can lack: it was in the same all-reduce as all others."""
    state = apply(history)
    newest = state.newest
    assert {each.iteration for each in newest} == {state.iteration}
    behind = apply(history[: len(history) - num_behind])
    for each in newest:
        behind = behind.apply(each)
    assert behind.iteration == state.iteration and behind.is_evaluated == state.is_evaluated
    assert replace(behind, evaluations=()) == replace(state, evaluations=())


def test_nothing_is_folded_out_of_turn():
    state = apply([entry(1)])
    with pytest.raises(AssertionError, match="entry 3 after 1"):
        state.apply(entry(3))
    with pytest.raises(AssertionError, match="evaluation 2 after entry 1"):
        state.apply(EvaluationEntry(iteration=2, loss=1.0))
    evaluated = state.apply(EvaluationEntry(iteration=1, loss=None))
    assert evaluated.is_evaluated
    assert not evaluated.apply(entry(2)).is_evaluated
    assert evaluated.apply(entry(2)).apply(EvaluationEntry(iteration=1, loss=9.0)).evaluations == evaluated.evaluations


def test_the_newest_of_nothing_is_nothing():
    assert TrainState(cursors=((0,), (1,))).newest == ()
    assert apply([entry(1)]).newest == (entry(1),)
    evaluation = EvaluationEntry(iteration=1, loss=1.0)
    assert apply([entry(1), evaluation]).newest == (entry(1), evaluation)
    assert apply([entry(1), evaluation, entry(2)]).newest == (entry(2),)
