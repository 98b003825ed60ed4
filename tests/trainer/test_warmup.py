"""Runs whose batch changes from step to step: shorter sequences first, fewer of them first; and runs by tokens.

That every layout trains them like one process is in the table of cells.py; here they lose ranks, resume, are counted.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.comparison.compare_runs import largest_difference, tolerance_of
from parallel3d.data.documents import TokenizedDocuments
from parallel3d.data.lanes import Lanes
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.size_schedule import Adaptive, BatchShapeSchedule, Constant, Periodic, Polynomial
from parallel3d.trainer.entry import Entry, EvaluationEntry
from parallel3d.trainer.loader import LaneLoader
from parallel3d.trainer.resume import data_position_to_json, skip_data_to, state_from_json, state_to_json
from parallel3d.trainer.state import TrainState
from tests.support import tiny_runs
from tests.support.kill_cells import kill_fault
from tests.support.saved_layouts import run_layout, save
from tests.support.thread_kills import assert_same_run, run
from tests.support.tiers import examples

CUBE = dict(pp_size=2, dp_size=2, tp_size=2, sequence_parallel=True)
UNEVEN = dict(pp_size=2, stage_replicas=[1, 2], tp_size=2, sequence_parallel=True, schedule="zb-h1")
SHAPE = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, hidden_dropout=0.1)
LENGTHS = dict(kind="linear", start=8, duration=5)
BOTH = dict(sequence_length=LENGTHS, batch_size=dict(start=2, duration=5))


def config_of(*, warmup=BOTH, parallel=CUBE, sums="exact", policy="fp64", sequence_length=64, **run_changes):
    return tiny_runs.make_config(
        model=SHAPE,
        parallel=dict(bucket_mib=0.003, **parallel),
        batch=dict(global_batch_size=6, micro_batch_size=1, sequence_length=sequence_length),
        precision=dict(policy=policy, sums=sums),
        warmup=warmup,
        run=dict(num_steps=5, evaluate_every=2, evaluate_batches=1) | run_changes,
    )


def starts(num_lanes):
    return ((0, 0, 0),) * num_lanes


def shapes_of(done):
    return [(record["num_sequences"], record["sequence_length"]) for _, record in sorted(done.steps.items())]


# --- the length of a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps, last", [(None, 3), (2, 2), (5, 3)])
def test_a_run_ends_with_the_step_that_reaches_its_tokens(num_steps, last):
    """6 x 8 tokens a step; with a number of steps beside it, whichever comes first."""
    done = run(config_of(warmup={}, sequence_length=8, num_steps=num_steps, num_tokens=2 * 48 + 1))
    assert sorted(done.steps) == list(range(1, last + 1))
    assert [done.steps[step]["tokens_read"] for step in done.steps] == [48 * step for step in done.steps]


def test_tokens_that_were_dropped_do_not_count():
    """Lengths 16, 24, 40, ...: the run ends by what it trains on, the lanes have moved on by whole sequences."""
    lengths = dict(sequence_length=LENGTHS)
    done = run(config_of(warmup=lengths, num_steps=None, num_tokens=6 * (16 + 24) + 1))
    assert shapes_of(done) == [(6, 16), (6, 24), (6, 40)]
    assert [done.steps[step]["tokens"] for step in (1, 2, 3)] == [6 * 16, 6 * 40, 6 * 80]
    assert [done.steps[step]["tokens_read"] for step in (1, 2, 3)] == [6 * 64, 12 * 64, 18 * 64]


# --- bit for bit ------------------------------------------------------------------------------------------------------


@cache
def exact_run(name):
    layouts = {
        "one": {},
        "pp2-dp2": dict(pp_size=2, dp_size=2),
        "pp2-dp2-interleaved": dict(pp_size=2, dp_size=2, schedule="interleaved", virtual_stages=2),
        "stages-1-2-zb-h1": dict(pp_size=2, stage_replicas=[1, 2], schedule="zb-h1"),
    }
    return run(config_of(policy="fp32", parallel=layouts[name]))


@pytest.mark.parametrize("layout", ["pp2-dp2", "pp2-dp2-interleaved", "stages-1-2-zb-h1"])
def test_with_exact_sums_the_layout_changes_no_bit(layout):
    assert shapes_of(exact_run("one")) == [(2, 16), (3, 24), (4, 40), (5, 48), (6, 64)]
    assert_same_run(exact_run(layout), exact_run("one"))


@cache
def undisturbed():
    return run(config_of())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "faults",
    [
        [kill_fault(0, "load", 3)],
        [kill_fault(5, "send", 2)],
        [kill_fault(3, "backward", 4)],
        [kill_fault(6, "all_reduce", 3)],
        [kill_fault(2, "update", 2)],
        [kill_fault(7, "evaluate", 2)],
        [kill_fault(1, "forward", 2), kill_fault(6, "recovery_moves", 2)],
    ],
    ids=lambda faults: "+".join(f"{fault.rank}-{fault.phase}-{fault.step}" for fault in faults),
)
def test_a_death_repeats_the_step_in_its_own_shape(faults):
    done = run(config_of(), faults)
    assert done.dead == tuple(sorted(fault.rank for fault in faults))
    assert_same_run(done, undisturbed())
    assert shapes_of(done) == shapes_of(undisturbed())


def test_lengths_that_grow_while_ranks_are_killed_equal_one_process():
    """Two stages, two replicas, two tensor ranks, lengths 8 to 64: losses, gradients, weights. One of each stage dies:
    others take over its lanes, which have moved on by what was trained on."""
    warmup = dict(sequence_length=dict(kind="linear", start=8, duration=8, recycle=True))
    config, alone = (config_of(warmup=warmup, sums="float", num_steps=8, parallel=layout) for layout in (CUBE, {}))
    ours, one = run(config, [kill_fault(1, "load", 3), kill_fault(6, "forward", 5)]), run(alone)
    assert [length for _, length in shapes_of(ours)] == [8, 16, 24, 32, 40, 48, 56, 64]
    assert ours.num_changes == 2 and ours.dead == (1, 6)
    losses = [[done.steps[step]["loss"] for step in range(1, 9)] for done in (ours, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    for what in ("gradients", "weights"):
        difference, name = largest_difference(getattr(ours.run, what), getattr(one.run, what))
        assert difference < tolerance_of(config).weights, f"{what} of {name}"


def test_evaluations_are_of_whole_sequences_whatever_training_has_come_to():
    """Evaluates the initial weights with a warmup and without: the same sequences, the same loss."""
    warm, plain = (
        run(config_of(warmup=warmup, evaluate_at_start=True, num_steps=1, evaluate_every=None, evaluate_at_end=False))
        for warmup in (BOTH, {})
    )
    assert warm.run.evaluation == plain.run.evaluation is not None
    assert warm.steps[1]["tokens"] < plain.steps[1]["tokens"]


# --- lengths by evaluations -------------------------------------------------------------------------------------------


def test_an_adaptive_length_is_the_same_on_every_layout_and_after_a_death():
    """Grows while evaluations are good; a tolerance that the second one breaks lets it shrink."""
    warmup = dict(sequence_length=dict(kind="adaptive", tolerance=1.0, start=16))
    settings = dict(warmup=warmup, num_steps=6, evaluate_every=1)
    one = run(config_of(**settings, parallel=dict(tp_size=2)))
    ours = run(config_of(**settings), [kill_fault(3, "evaluate", 2), kill_fault(4, "update", 3)])
    assert shapes_of(ours) == shapes_of(one)
    lengths = [length for _, length in shapes_of(one)]
    assert lengths[:2] == [16, 24] and len(set(lengths)) > 2
    assert {abs(b - a) for a, b in zip(lengths, lengths[1:])} <= {0, 8}


VARIANCE = dict(sequence_length=dict(kind="variance", interval=2, tolerance=1.3, start=16))


def test_a_length_by_the_variance_is_the_same_on_every_layout_and_after_a_death():
    """With exact sums: bitwise the run without losses, too."""
    settings = dict(warmup=VARIANCE, num_steps=8)
    one = run(config_of(**settings, parallel=dict(tp_size=2)))
    ours = run(config_of(**settings), [kill_fault(3, "backward", 3), kill_fault(4, "update", 5)])
    assert shapes_of(ours) == shapes_of(one)
    lengths = [length for _, length in shapes_of(one)]
    assert len(set(lengths)) > 1 and {abs(b - a) for a, b in zip(lengths, lengths[1:])} <= {0, 8}
    assert_same_run(ours, run(config_of(**settings)))


def test_a_run_by_the_variance_goes_on_bitwise(tmp_path):
    config = config_of(warmup=VARIANCE)
    whole, _, whole_ranks = run_layout(config, steps=5)
    _, snapshots, ranks = run_layout(config, steps=2)
    folder = save(tmp_path, snapshots, ranks[0])
    again, _, again_ranks = run_layout(config, start=folder, steps=3)
    assert [name for name in whole if not torch.equal(whole[name], again[name])] == []
    assert again_ranks[0].state == whole_ranks[0].state
    assert whole_ranks[0].state.shape_schedule.length.recent


# --- going on from a checkpoint ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("there", [CUBE, UNEVEN], ids=["cube", "stages-1-2-zb-h1"])
@pytest.mark.parametrize("recycle", [False, True])
def test_a_run_goes_on_in_mid_warmup_bitwise(tmp_path, there, recycle):
    warmup = BOTH | dict(sequence_length=LENGTHS | dict(recycle=recycle))
    config = config_of(warmup=warmup)
    whole, _, whole_ranks = run_layout(config, steps=5)
    _, snapshots, ranks = run_layout(config, steps=2)
    folder = save(tmp_path, snapshots, ranks[0])
    again, _, again_ranks = run_layout(config_of(warmup=warmup, parallel=there), start=folder, steps=3)
    assert [name for name in whole if not torch.equal(whole[name], again[name])] == []
    assert again_ranks[0].state == whole_ranks[0].state


@given(st.lists(st.floats(1, 9), max_size=8), st.integers(0, 8))
def test_an_adaptive_state_survives_a_checkpoint(losses, cut):
    fresh = TrainState(
        cursors=starts(2),
        shape_schedule=BatchShapeSchedule(length=Adaptive(first=8, last=32, multiple=8, value=8), read_length=32),
    )

    def go_on(state, losses):
        for loss in losses:
            state = state.apply(step_of(state, cursors=state.cursors))
            state = state.apply(EvaluationEntry(iteration=state.iteration, loss=loss))
        return state

    saved = json.loads(json.dumps(state_to_json(go_on(fresh, losses[:cut]))))
    assert go_on(state_from_json(saved, fresh), losses[cut:]) == go_on(fresh, losses)


def test_an_evaluation_that_comes_again_moves_the_length_once():
    state = TrainState(
        cursors=starts(1), shape_schedule=BatchShapeSchedule(length=Adaptive(first=8, last=32, multiple=8, value=8))
    )
    state = state.apply(step_of(state, cursors=state.cursors))
    evaluation = EvaluationEntry(iteration=1, loss=3.0)
    assert state.apply(evaluation).shape.sequence_length == 16
    assert state.apply(evaluation).apply(evaluation) == state.apply(evaluation)


def test_text_that_is_left_out_after_a_divergence_is_no_progress():
    """A run that goes back to its second step, and on behind what it has read until its fourth."""
    shape_schedule = BatchShapeSchedule(
        length=Polynomial(first=8, last=32, duration=60, multiple=8), length_unit="tokens", read_length=32
    )
    states = [TrainState(cursors=starts(1), shape_schedule=shape_schedule)]
    for number in range(4):
        states.append(states[-1].apply(step_of(states[-1], cursors=((0, 0, number + 1),))))
    behind = skip_data_to(states[2], json.loads(json.dumps(data_position_to_json(states[4]))))
    assert behind.cursors == ((0, 0, 4),) and behind.tokens_read == states[4].tokens_read == 128
    assert behind.tokens_seen == states[2].tokens_seen and behind.shape == states[2].shape != states[4].shape


# --- every token accounted for ----------------------------------------------------------------------------------------


def step_of(state, *, cursors):
    shape = state.shape
    return Entry(
        iteration=state.iteration + 1,
        squared_norm=1.0,
        finite=True,
        num_target_tokens=shape.num_tokens,
        loss_sum=1.0,
        stop=False,
        leave=False,
        cursors=tuple(cursors[: shape.num_sequences]),
    )


def trained_tokens(lanes, shape_schedule, num_steps, *, resume_at):
    """The targets of each lane in order, the shapes of the steps, and the state: data and fold alone, no model."""
    loader = LaneLoader(lanes, torch.device("cpu"), read_length=shape_schedule.read_length)
    fresh = state = TrainState(cursors=starts(lanes.num_lanes), shape_schedule=shape_schedule)
    targets = [[] for _ in range(lanes.num_lanes)]
    shapes = []
    for step in range(num_steps):
        if step == resume_at:
            state = state_from_json(json.loads(json.dumps(state_to_json(state))), fresh)
        shape = state.shape
        batch = BatchPlan(
            seed=0,
            iteration=step + 1,
            num_micro_batches=shape.num_sequences,
            micro_batch_size=1,
            sequence_length=shape.sequence_length,
        )
        loader.begin(state.cursors, state.tokens_read)
        for number in range(batch.num_micro_batches):
            targets[number].append(loader.load(batch.micro_batch(number)).targets.numpy())
        cursors = [loader.next_cursors[slot] for slot in range(batch.num_slots)]
        state = state.apply(step_of(state, cursors=cursors))
        shapes.append(shape)
    return [np.concatenate(parts) if parts else np.zeros(0, np.int64) for parts in targets], shapes, state


def dropped_tails(shapes):
    """(lane, first target, length) of what is dropped; metrics.jsonl has the sizes of every step."""
    position = {}
    for shape in shapes:
        for lane in range(shape.num_sequences):
            begin = position.get(lane, 0)
            if shape.num_dropped_tokens:
                yield lane, begin + shape.sequence_length, shape.read_length - shape.sequence_length
            position[lane] = begin + shape.read_length


@settings(max_examples=examples(60), deadline=None)
@given(
    length=st.sampled_from(
        [
            Constant(16),
            Polynomial(first=8, last=32, duration=6, multiple=8),
            Polynomial(first=8, last=32, duration=300, multiple=8, exponent=0.5),
            Periodic(sizes=(8, 32), until=(2, 3)),
        ]
    ),
    size=st.sampled_from([Constant(4), Polynomial(first=1, last=4, duration=5, multiple=1)]),
    unit=st.sampled_from(["steps", "tokens"]),
    recycle=st.booleans(),
    seed=st.integers(0, 99),
    num_steps=st.integers(1, 9),
    resume_at=st.integers(0, 9),
)
def test_lanes_train_on_a_prefix_of_their_text_but_for_the_logged_tails(
    length, size, unit, recycle, seed, num_steps, resume_at
):
    lanes = Lanes(TokenizedDocuments(tiny_runs.Texts(), tiny_runs.ByteTokenizer()), seed, 4)
    shape_schedule = BatchShapeSchedule(length=length, length_unit=unit, size=size, read_length=None if recycle else 32)
    trained, shapes, state = trained_tokens(lanes, shape_schedule, num_steps, resume_at=resume_at)
    tails = list(dropped_tails(shapes))
    assert not (recycle and tails)
    assert state.tokens_dropped == sum(count for _, _, count in tails)
    assert state.tokens_seen == state.tokens_trained == sum(map(len, trained))
    start = starts(4)
    for lane, ours in enumerate(trained):
        moved_by = sum(shape.read_length for shape in shapes if lane < shape.num_sequences)
        if not moved_by:
            assert state.cursors[lane] == start[lane]
            continue
        text, cursor = lanes.read(lane, start[lane], moved_by)
        keep = np.ones(moved_by, bool)
        for _, begin, count in (tail for tail in tails if tail[0] == lane):
            keep[begin : begin + count] = False
        assert np.array_equal(ours, text[1:][keep]) and state.cursors[lane] == cursor
