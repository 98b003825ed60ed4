"""Every layout trains like one process: losses, every gradient, gradient norms, weights, evaluation."""

from functools import cache
from itertools import product

import pytest
import torch

from parallel3d.trainer.verify import largest_difference

# fp64: sums of a few thousand terms in another order differ by some 1e-15 a step; AdamW divides by sqrt(v), which
# magnifies that for elements whose gradient is near zero, three steps in a row.
FP64, FP64_WEIGHTS = 1e-10, 1e-10
SIZES = [s for s in product((1, 2, 4), repeat=3) if s[0] * s[1] * s[2] <= 8]
# Each pair of values of two switches stands in some row, for every layout; rows rotate with the layout.
SWITCHES = [
    dict(schedule="1f1b", zero_stage=1, sequence_parallel=True, kv=4),
    dict(schedule="gpipe", zero_stage=0, sequence_parallel=True, kv=2),
    dict(schedule="1f1b", zero_stage=0, sequence_parallel=False, kv=2),
    dict(schedule="gpipe", zero_stage=1, sequence_parallel=False, kv=4),
    dict(schedule="1f1b", zero_stage=1, sequence_parallel=True, kv=2),
]


@pytest.fixture(scope="module")
def reference(run_layout):
    @cache
    def run(kv, policy="fp64", drop=0.0, micro=1):
        return run_layout(**sections(kv, policy=policy, drop=drop, micro=micro))

    return run


def sections(kv=4, *, policy="fp64", drop=0.0, micro=1, **parallel):
    return dict(
        model=dict(num_key_value_heads=kv, hidden_dropout=drop),
        precision=dict(policy=policy),
        batch=dict(micro_batch_size=micro),
        parallel=parallel,
    )


def assert_same_run(ours, theirs, loss=FP64, weights=FP64_WEIGHTS):
    assert ours.losses == pytest.approx(theirs.losses, rel=loss)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=loss)
    assert ours.evaluation == pytest.approx(theirs.evaluation, rel=loss)
    assert [e.cursors for e in ours.entries] == [e.cursors for e in theirs.entries]
    assert all(torch.equal(ours.initial[name], theirs.initial[name]) for name in theirs.initial)
    for mine, yours in ((ours.gradients, theirs.gradients), (ours.weights, theirs.weights)):
        difference, name = largest_difference(mine, yours)
        assert difference < weights, name


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("tp,pp,dp", SIZES)
def test_layout_equals_one_process(run_layout, reference, tp, pp, dp, row):
    switches = dict(SWITCHES[(row * 2 + SIZES.index((tp, pp, dp))) % len(SWITCHES)])
    kv = max(switches.pop("kv"), tp)
    ours = run_layout(**sections(kv, tp_size=tp, pp_size=pp, dp_size=dp, **switches))
    assert_same_run(ours, reference(kv))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("counts,tp", [((2, 1), 1), ((1, 2), 1), ((2, 1), 2), ((3, 1, 2), 1), ((1, 3, 2, 1), 1)])
def test_stages_with_different_numbers_of_replicas(run_layout, reference, counts, tp, schedule):
    parallel = dict(tp_size=tp, pp_size=len(counts), stage_replicas=list(counts), schedule=schedule)
    assert_same_run(run_layout(**sections(**parallel)), reference(4))


@pytest.mark.parametrize("order", ["pp_dp_tp", "dp_pp_tp"])
def test_order_of_ranks_changes_nothing(run_layout, reference, order):
    assert_same_run(run_layout(**sections(tp_size=2, pp_size=2, dp_size=2, order=order)), reference(4))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp,pp,dp,micro", [(2, 2, 2, 1), (1, 2, 2, 2), (2, 1, 2, 4), (4, 2, 1, 2)])
def test_dropout_is_the_same_on_every_layout(run_layout, reference, tp, pp, dp, micro, sequence_parallel):
    parallel = dict(tp_size=tp, pp_size=pp, dp_size=dp, sequence_parallel=sequence_parallel)
    ours = run_layout(**sections(drop=0.2, micro=micro, **parallel))
    assert_same_run(ours, reference(4, drop=0.2))
    assert ours.losses != pytest.approx(reference(4).losses, rel=1e-4)


@pytest.mark.parametrize("tp,pp,dp", [(1, 1, 4), (2, 2, 2), (1, 4, 2), (4, 1, 1)])
def test_fp32_losses(run_layout, reference, tp, pp, dp):
    """fp32: 24 bits; three steps of AdamW apart, losses agree to 1e-5."""
    ours = run_layout(**sections(policy="fp32", tp_size=tp, pp_size=pp, dp_size=dp, sequence_parallel=tp > 1))
    theirs = reference(4, policy="fp32")
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.losses == pytest.approx(reference(4).losses, rel=1e-4)


@pytest.mark.parametrize("tp,pp,dp", [(1, 2, 2), (2, 2, 2)])
def test_bf16_losses(run_layout, reference, tp, pp, dp):
    """bf16 activations have 8 bits: layouts round differently over the tensor-parallel sum, so 1 %."""
    ours = run_layout(**sections(policy="bf16", tp_size=tp, pp_size=pp, dp_size=dp, sequence_parallel=tp > 1))
    assert ours.losses == pytest.approx(reference(4, policy="bf16").losses, rel=1e-2)
    assert ours.losses == pytest.approx(reference(4).losses, rel=2e-2)


@pytest.mark.parametrize("tp,pp,dp,zero", [(1, 1, 4, 1), (2, 2, 2, 1), (1, 4, 2, 0)])
def test_overlap_changes_no_bit(run_layout, tp, pp, dp, zero):
    parallel = dict(tp_size=tp, pp_size=pp, dp_size=dp, zero_stage=zero)
    runs = [
        run_layout(**sections(policy="fp32", overlap_grad_reduce=a, overlap_param_gather=b, **parallel))
        for a, b in ((True, True), (False, False), (True, False))
    ]
    for other in runs[1:]:
        assert other.entries == runs[0].entries
        assert all(torch.equal(other.weights[name], weight) for name, weight in runs[0].weights.items())


def test_bucket_size_decides_only_the_order_of_sums(run_layout, reference):
    assert_same_run(run_layout(**sections(dp_size=4, bucket_mib=100.0)), reference(4))
    assert_same_run(run_layout(**sections(dp_size=4, bucket_mib=0.001)), reference(4))


def test_norms_and_biases_decay_only_on_request(run_layout):
    plain, decayed = (
        run_layout(steps=1, optimizer=dict(weight_decay=0.9, decay_norms_and_biases=on, max_grad_norm=None))
        for on in (False, True)
    )
    changed = {name for name in plain.weights if not torch.equal(plain.weights[name], decayed.weights[name])}
    assert changed == {name for name in plain.weights if "norm" in name}
