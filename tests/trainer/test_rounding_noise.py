"""bf16_sr in whole runs: what every tensor-parallel rank holds stays the same on all of them; seeds count."""

import pytest
import torch

from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.optim.parameter_noise import ParameterNoise
from parallel3d.random_keys import key_of
from parallel3d.trainer.plans import build_grid
from tests.support import tiny_runs

LAYOUTS = [dict(tp_size=4), dict(tp_size=2, sequence_parallel=True), dict(tp_size=2, pp_size=2, dp_size=2)]


def run(run_layout, parallel, *targets):
    """Three steps; putting the ranks' parts together asserts that copies agree bit for bit."""
    return run_layout(precision=dict(policy="bf16_sr", stochastic_rounding=list(targets)), parallel=parallel)


def norms_of(done):
    return {name: weight for name, weight in done.weights.items() if "norm" in name}


@pytest.mark.sample(2)
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("targets", [(), ("accumulation", "outputs")], ids=str)
def test_norm_weights_stay_the_same_over_the_tensor_parallel_ranks(run_layout, parallel, targets):
    norms = norms_of(run(run_layout, parallel, *targets))
    assert len(norms) == 9 and all(weight.dtype is torch.bfloat16 for weight in norms.values())
    assert all(not torch.equal(weight, torch.ones_like(weight)) for weight in norms.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_noise_of_each_ranks_own_would_make_them_drift(run_layout, parallel, monkeypatch):
    """As HLAT saw it (section IV-A): its ranks drew their own noise."""
    keyed_by_rank = lambda self, *what, name: key_of(self.seed, *what, name, self.tp.rank)  # noqa: E731
    monkeypatch.setattr(ParameterNoise, "key", keyed_by_rank)
    with pytest.raises(AssertionError, match="norm.weight differs over the tp group"):
        run(run_layout, parallel)


def test_another_seed_is_another_noise(run_layout, monkeypatch):
    """The same initial weights and text: the seed of the noise alone is another."""
    plain = run(run_layout, {})
    monkeypatch.setattr(ParameterNoise, "key", lambda self, *what, name: key_of(99, *what, name))
    other = run(run_layout, {})
    assert other.losses[0] == plain.losses[0] and other.losses != plain.losses
    assert other.losses == pytest.approx(plain.losses, rel=2e-2)


def test_the_same_run_again_is_the_same(run_layout):
    first, second = (run(run_layout, dict(tp_size=2)) for _ in range(2))
    assert first.entries == second.entries
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_each_place_that_is_asked_for_changes_the_run(run_layout):
    losses = [run(run_layout, {}, *targets).losses for targets in ((), ("update",), ("accumulation",), ("outputs",))]
    plain, same, accumulated, rounded = losses
    assert same == plain
    assert accumulated[0] == plain[0] and accumulated[1] != plain[1]  # gradients alone
    assert rounded[0] != plain[0]
    for other in (accumulated, rounded):
        assert other == pytest.approx(plain, rel=2e-2)


def test_each_term_that_is_added_has_noise_of_its_own():
    """Iteration, first slot of the micro-batch and pass key it; elements that get nothing stay as they are."""
    config = tiny_runs.make_config(precision=dict(policy="bf16_sr", stochastic_rounding=["accumulation"]))
    bucket = tiny_runs.prepare(config, build_grid(config), 0).optimizer.buckets[0]

    def rounded(grad_pass="backward", iteration=3, slot=2):
        batch = MicroBatch(seed=config.run.seed, iteration=iteration, slots=(slot,), sequence_length=16)
        bucket.clear()
        bucket.zero_unwritten_grads()  # as if layers had added to all of them
        bucket.totals.fill_(1.0)
        for value in (0.001, 0.0):  # the second time there is nothing to add
            bucket.grads[::2] = value
            assert bucket.finalize_micro_batch_grads(batch, grad_pass) and not bucket.grads.any()
        return bucket.totals.clone()

    plain = rounded()
    assert plain[::2].unique().tolist() == [1.0, 1.0078125] and (plain[1::2] == 1.0).all()
    assert torch.equal(rounded(), plain)
    for other in (rounded("forward"), rounded(iteration=4), rounded(slot=3)):
        assert not torch.equal(other, plain)
