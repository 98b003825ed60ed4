"""Runs on a blend: after a death or a resume on another layout every lane continues in each of its sources."""

import pytest

from parallel3d.errors import CheckpointError
from tests.support import tiny_runs
from tests.support.kill_cells import Outcome, kill_fault
from tests.support.saved_layouts import assert_equal, run_layout, save
from tests.support.thread_kills import assert_same_run, outcome_of, run

LENGTH = dict(global_batch_size=6, micro_batch_size=1, sequence_length=8)
SWITCH = 8 * 6 * 2 + 24
"""In the middle of the third step."""


def blended(blend=None, **parallel):
    return tiny_runs.make_config(
        model=dict(hidden_size=16, intermediate_size=24),
        batch=LENGTH,
        parallel=parallel,
        precision=dict(policy="fp32", sums="exact"),
        lr_schedule=dict(kind="constant", warmup_steps=0),
        data=dict(blend=blend or tiny_runs.blend_from(SWITCH)),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("recycle", [True, False])
def test_a_blend_under_growing_lengths_and_batches_survives_a_death(recycle):
    """Lanes that a step does not read keep their places, and their turn in the blend."""

    def config(**parallel):
        return tiny_runs.make_config(
            model=dict(hidden_size=8, intermediate_size=16, num_attention_heads=2),
            parallel=dict(bucket_mib=0.003, **parallel),
            batch=dict(global_batch_size=6, micro_batch_size=1, sequence_length=32),
            precision=dict(sums="exact"),
            warmup=dict(
                sequence_length=dict(kind="linear", start=8, duration=5, recycle=recycle),
                batch_size=dict(start=2, duration=5),
            ),
            data=dict(blend=tiny_runs.blend_from(72 if recycle else 250)),
            run=dict(num_steps=5, evaluate_every=2, evaluate_batches=1),
        )

    done = run(config(pp_size=2, dp_size=2, tp_size=2), [kill_fault(1, "backward", step=3)])
    assert outcome_of(done) == Outcome(frozenset({1}), 1, True)
    assert_same_run(done, run(config(tp_size=2)), gradients=False)
    stages, num_sequences = zip(*(cursor[:2] for cursor in done.run.entries[-1].cursors))
    assert set(stages) == {1} and len(set(num_sequences)) > 1


def test_a_resumed_run_is_the_run_bit_for_bit_on_another_layout(tmp_path):
    whole, _, ends = run_layout(blended(dp_size=2), steps=5)
    _, snapshots, runtimes = run_layout(blended(dp_size=2), steps=2)
    first = save(tmp_path, snapshots, runtimes[0])
    for layout in (dict(dp_size=3), dict(pp_size=2, dp_size=2), {}):
        again, _, others = run_layout(blended(**layout), start=first, steps=3)
        assert_equal(again, whole)
        assert others[0].state.cursors == ends[0].state.cursors
        assert others[0].state.tokens_read == ends[0].state.tokens_read


def test_weights_may_change_on_resume_and_the_places_stay(tmp_path):
    _, snapshots, runtimes = run_layout(blended(), steps=2)
    first = save(tmp_path, snapshots, runtimes[0])
    before = runtimes[0].state.cursors
    only_odd = tiny_runs.blend_from(SWITCH) | dict(stages=[dict(weights={"even": 0.0, "odd": 1.0})])
    only_odd["stages"].append(dict(from_token=10**6, weights={"even": 1.0}))
    _, _, others = run_layout(blended(only_odd), start=first, steps=2)
    for old, new in zip(before, others[0].state.cursors):
        assert new[2:5] == old[2:5], "the source without weight has moved on"
        assert new[5:] > old[5:]


def test_cursors_of_another_kind_are_refused(tmp_path):
    """A blend of two sources can't go on where lanes of one have been."""
    plain = tiny_runs.make_config(**{**PLAIN, "batch": LENGTH})
    _, snapshots, runtimes = run_layout(plain, steps=1)
    first = save(tmp_path, snapshots, runtimes[0])
    with pytest.raises(CheckpointError, match="have 3 numbers, .* have 8"):
        run_layout(blended(), start=first)


PLAIN = dict(model=dict(hidden_size=16, intermediate_size=24), precision=dict(policy="fp32", sums="exact"))
