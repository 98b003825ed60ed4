"""The replica check in whole runs: a flipped bit is found at the next check and named; nothing else ever is."""

from dataclasses import replace

import pytest
import torch

from parallel3d.debug.replica_check import has_difference
from parallel3d.errors import ReplicasDiffer
from parallel3d.precision.policy import POLICIES
from parallel3d.trainer.entry import Contribution
from parallel3d.trainer.entry_layout import EntryLayout
from tests.support.kill_cells import kill_fault
from tests.support.kill_layouts import config_of
from tests.support.thread_kills import run, undisturbed
from tests.support.tiny_runs import make_config

CHECKED = dict(replica_check_every=1)


def checked(layout, **changes):
    config = config_of(layout, **changes)
    return config.model_copy(update=dict(debug=config.debug.model_copy(update=CHECKED)))


def flip(tensor):
    """Flips the lowest bit of the first element."""
    tensor.detach().reshape(-1)[:1].view(torch.int64).bitwise_xor_(1)


def parameter_of(runtime, name):
    return next(p for p in runtime.chunks.parameters() if p.sharding.name == name)


def before_step(rank, step, act):
    """A watcher that calls `act(runtime)` once, as `rank` begins its forward passes of `step`."""

    def watch(this, runtime):
        todo, on_instruction = [step] if this == rank else [], runtime.hooks.on_instruction

        def watched(instruction):
            if todo == [runtime.state.iteration + 1]:
                todo.clear()
                runtime.optimizer.finish_gather()  # it would write over what is flipped now
                act(runtime)
            on_instruction(instruction)

        runtime.hooks = replace(runtime.hooks, on_instruction=watched)

    return watch


def flip_weight(name):
    return lambda runtime: flip(parameter_of(runtime, name))


def flip_backup_moment(runtime):
    bucket = next(bucket for bucket in runtime.optimizer.buckets if not bucket.plan.key.tp_replicated)
    flip(bucket.shards[1].states[1])


def flip_norm_moment(runtime):
    bucket = next(bucket for bucket in runtime.optimizer.buckets if bucket.plan.key.tp_replicated)
    flip(bucket.owned.states[0])


FLIPS = {  # layout, rank, what is flipped, what the message says
    "a weight of a replica": (
        "pp2-dp4",
        5,
        flip_weight("layers.2.mlp.down.weight"),
        "weights of layers.2.mlp.down.weight[0:128]: rank 5 (pp1 dp1 tp0) against 3 others",
    ),
    "a weight of one of two replicas": (
        "pp3-dp2",
        0,
        flip_weight("embedding.weight"),
        "weights of embedding.weight[0:2056]: rank 0 (pp0 dp0 tp0) / rank 1 (pp0 dp1 tp0), no majority",
    ),
    "an embedding of one end against the head of the other": (
        "tied-stages-2-1-3",
        3,
        flip_weight("embedding.weight"),
        "weights of embedding.weight[0:2056]: rank 3 (pp2 dp0 tp0) against 4 others",
    ),
    "a norm of a tensor-parallel rank": (
        "pp2-dp2-tp2",
        3,
        flip_weight("layers.0.attention_norm.weight"),
        "weights of layers.0.attention_norm.weight[0:8]: rank 3 (pp0 dp1 tp1) against 3 others",
    ),
    "a weight that tensor-parallel ranks share": (
        "pp2-dp2-tp2",
        6,
        flip_weight("head.weight"),
        "weights of head.weight[0:1032] at tp0: rank 4 (pp1 dp0 tp0) / rank 6 (pp1 dp1 tp0), no majority",
    ),
    "a moment of a backup": ("pp2-dp4", 2, flip_backup_moment, "second moment of "),
    "a norm's moment of an owner": ("pp2-dp2-tp2", 1, flip_norm_moment, "first moment of "),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FLIPS)
def test_a_flipped_bit_is_found_and_named(name):
    layout, rank, act, text = FLIPS[name]
    with pytest.raises(ReplicasDiffer) as caught:
        run(checked(layout), watch=before_step(rank, 2, act))
    assert "differ before the update of step 2" in str(caught.value)
    assert text in str(caught.value) and f"rank {rank} (" in str(caught.value)
    assert str(caught.value).count("\n") == 1, "one bit, one line"


def test_replicas_that_agree_on_what_tensor_parallel_ranks_do_not():
    """A norm that drifts apart over the tensor-parallel ranks, alike in all replicas: what per-rank noise would do."""
    act = flip_weight("layers.0.attention_norm.weight")
    watchers = [before_step(rank, 2, act) for rank in (1, 3)]
    with pytest.raises(ReplicasDiffer) as caught:
        run(checked("pp2-dp2-tp2"), watch=lambda rank, runtime: [watch(rank, runtime) for watch in watchers])
    text = "weights of layers.0.attention_norm.weight[0:8]: rank 0 (pp0 dp0 tp0), rank 2 (pp0 dp1 tp0) / rank 1"
    assert text in str(caught.value)


def test_key_heads_that_neighbouring_ranks_share():
    """4 tensor-parallel ranks, 2 key-value heads: a rank's copy of one drifts, alike in all replicas."""
    config = make_config(
        model=dict(num_key_value_heads=2),
        parallel=dict(tp_size=4, dp_size=2, bucket_mib=100.0),
        debug=CHECKED,
        run=dict(num_steps=2),
    )
    assert len(run(config).steps) == 2

    def flip_last(runtime):
        parameter = parameter_of(runtime, "layers.1.attention.qkv.weight").detach()
        parameter.reshape(-1)[-1:].view(torch.int64).bitwise_xor_(1)  # of a value head

    watchers = [before_step(rank, 2, flip_last) for rank in (3, 7)]
    with pytest.raises(ReplicasDiffer) as caught:
        run(config, watch=lambda rank, runtime: [watch(rank, runtime) for watch in watchers])
    assert "weights of layers.1.attention.qkv.weight[512:768] at tp2 to tp3: rank 2 (" in str(caught.value)


def test_state_that_differs_stays_and_is_found_at_the_next_check():
    config = config_of("pp2-dp4", num_steps=4)
    debug = config.debug.model_copy(update=dict(replica_check_every=4))
    with pytest.raises(ReplicasDiffer, match="second moment of .*\n?.*"):
        run(config.model_copy(update=dict(debug=debug)), watch=before_step(2, 2, flip_backup_moment))


def test_a_warning_lets_the_run_go_on(monkeypatch):
    config = checked("pp2-dp2-tp2")
    config = config.model_copy(update=dict(debug=config.debug.model_copy(update=dict(replica_check_action="warn"))))
    done = run(config, watch=before_step(3, 2, flip_weight("layers.0.attention_norm.weight")))
    assert done.run is not None and len(done.steps) == 3
    assert [bool(entry.differing_stages) for entry in done.run.entries] == [True, False], "the gather has mended it"


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["pp2-dp2-tp2", "pp3-dp2", "pp2-dp4", "tied-pp2-dp2-tp2"])
@pytest.mark.parametrize("zero_stage, zero_backups", [(1, 1), (1, 0), (0, 1)])
def test_no_false_alarm(layout, zero_stage, zero_backups):
    done = run(checked(layout, zero_stage=zero_stage, zero_backups=zero_backups))
    assert len(done.steps) == 3
    assert [entry.differing_stages for entry in done.run.entries] == [(), ()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "fp64"])
def test_no_false_alarm_in_other_formats(policy):
    config = make_config(
        parallel=dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True),
        precision=dict(policy=policy),
        debug=CHECKED,
    )
    assert len(run(config).steps) == 3


def test_no_false_alarm_on_chunks_of_layers():
    parallel = dict(pp_size=2, dp_size=2, schedule="interleaved", virtual_stages=2, recompute="full")
    assert len(run(make_config(parallel=parallel, model=dict(architecture="gpt2"), debug=CHECKED)).steps) == 3


@pytest.mark.sample(3)
@pytest.mark.parametrize("phase", ["forward", "backup", "all_reduce", "update", "all_gather", "recovery_moves"])
def test_no_false_alarm_over_losses(phase):
    """The check changes nothing, and a loss in a checked step is not taken for a difference."""
    faults = (
        [kill_fault(1, "backward"), kill_fault(6, phase)] if phase.startswith("recovery") else [kill_fault(6, phase)]
    )
    done = run(checked("pp2-dp4"), faults)
    assert not done.abort_reason and done.num_changes >= 1
    losses = [done.steps[step]["loss"] for step in sorted(done.steps)]
    assert losses == [record["loss"] for record in undisturbed("pp2-dp4").steps.values()]


def test_a_difference_is_found_after_a_loss_has_begun_the_step_anew():
    """The rank that found it first may be gone: the check is made again with its iteration."""
    act = flip_weight("layers.2.mlp.down.weight")
    with pytest.raises(ReplicasDiffer, match="rank 5"):
        run(
            checked("pp2-dp4"),
            [kill_fault(0, "all_reduce")],
            watch=before_step(5, 2, lambda runtime: act(runtime)),
        )


def test_the_check_is_in_the_vector_only_where_it_is_due():
    layout = EntryLayout(num_stages=2, num_micro_batches=1, num_slots=1, cursor_size=3)
    backward_counts = {(0, 0): 1, (1, 0): 1}
    plain = layout.pack(Contribution(num_target_tokens=1, backward_counts=backward_counts))
    both = layout.pack(Contribution(num_target_tokens=1, backward_counts=backward_counts, replica_check={1: [7, 9]}))
    assert [*both] == [*plain, 0.0, 0.0, 7.0, 9.0]
    assert layout.unpack(1, plain).differing_stages == ()
    assert layout.unpack(1, both).differing_stages == (1,) and has_difference([7.0, 9.0])
