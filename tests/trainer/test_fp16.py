"""fp16 in whole runs: one scale for all ranks, an overflow skips one update everywhere, and deaths change neither."""

import pytest
import torch

from parallel3d.layers.cross_entropy import LinearCrossEntropy
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.precision.policy import POLICIES
from tests.support import kill_cells, kill_layouts, thread_kills, tiny_runs

DYNAMIC = dict(
    policy="fp16", loss_scale=dict(initial=2.0**21, growth_interval=2, growth_factor=64.0, backoff_factor=1 / 64)
)
"""The first step overflows, two are finite, and so on; far from the ceiling, which layouts reach at other scales."""


def run(steps=4, precision=DYNAMIC, **changes):
    return tiny_runs.train_in_threads(steps=steps, precision=precision, **changes)


def finite(done):
    return [entry.finite for entry in done.entries]


@pytest.mark.parametrize(
    "parallel, sums",
    [
        (dict(dp_size=2), "float"),
        (dict(pp_size=2), "exact"),
        (dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True), "float"),
    ],
)
def test_an_overflow_skips_the_update_on_all_ranks(parallel, sums):
    """Putting the ranks' parts together asserts equal entries and equal weights."""
    precision = {**DYNAMIC, "sums": sums}
    ours, one = run(precision=precision, parallel=parallel), run(precision=precision)
    assert finite(ours) == finite(one)
    assert finite(ours) == [False, True, True, False]
    assert ours.losses[1] == pytest.approx(ours.losses[0], rel=0.2) and ours.losses == pytest.approx(
        one.losses, rel=2e-3
    )


def test_entries_and_gradients_are_free_of_the_scale():
    """Powers of two: a norm under one scale is the norm under another, but for what falls below fp16's last bit."""
    runs = [run(3, dict(policy="fp16", loss_scale=dict(initial=2.0**k, growth_interval=None))) for k in (10, 11, 14)]
    reference = run(3, dict(policy="fp64"))
    for done in runs:
        assert done.grad_norms == pytest.approx(runs[0].grad_norms, rel=1e-3)
        assert done.grad_norms == pytest.approx(reference.grad_norms, rel=2e-2)
        assert done.losses == pytest.approx(reference.losses, rel=2e-3)


def test_without_a_scale_small_gradients_vanish():
    """Why there is one: the share of exact zeros among the first layer's gradients."""
    zeros = []
    for scale in (2.0**-20, 65536.0):
        done = run(1, dict(policy="fp16", loss_scale=dict(initial=scale, min=2.0**-20, growth_interval=None)))
        zeros.append((done.gradients["layers.0.mlp.down.weight"] == 0).double().mean().item())
    assert zeros[0] > 0.3 and zeros[1] < 0.01


# --- deaths -----------------------------------------------------------------------------------------------------------


def config_of(num_steps=5):
    """As in the kill matrix; overflows in the first steps, growth every second finite one."""
    config = kill_layouts.config_of("pp2-dp4", num_steps=num_steps)
    scale = config.precision.loss_scale.model_copy(update=dict(initial=2.0**21, growth_interval=2))
    precision = config.precision.model_copy(update=dict(policy="fp16", loss_scale=scale))
    return config.model_copy(update=dict(precision=precision))


@pytest.fixture(scope="module")
def undisturbed():
    done = thread_kills.run(config_of())
    scales = [done.steps[step]["loss_scale"] for step in sorted(done.steps)]
    assert len(set(scales)) > 2 and done.steps[1]["num_updates"] == 0 and done.steps[5]["num_updates"] > 1
    return done


@pytest.mark.sample(2, rest=6)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("phase", ["forward", "backward", "backup", "all_reduce", "update", "all_gather"])
def test_a_death_does_not_move_the_scale(undisturbed, phase, step):
    """In a step that overflows, and in one that does not; the repeated step has the same scale."""
    done = thread_kills.run(config_of(), [kill_cells.kill_fault(6, phase, step)])
    thread_kills.assert_same_run(done, undisturbed)
    for number, record in undisturbed.steps.items():
        assert done.steps[number]["loss_scale"] == record["loss_scale"], number


def test_the_head_multiplies_before_it_narrows():
    """A token with a probability of 2e-9 has a gradient that fp16 does not have; 2**12 of it is one, and comes out."""
    weight = torch.zeros(50, 16)
    weight[7, 0] = -16.0
    hidden, targets = torch.ones(8, 16), torch.zeros(8, dtype=torch.int64)
    grads = {}
    for policy, factor in (("fp16", 1.0), ("fp16", 4096.0), ("fp32", 1.0), ("fp32", 4096.0)):
        context = LayerContext(tp=solo_region(), policy=POLICIES[policy])
        head = LinearCrossEntropy("head", 50, 16, init_std=0.02, context=context)
        head.weight.data.copy_(weight)
        x = hidden.to(POLICIES[policy].compute).requires_grad_()
        head(x, targets, factor).backward()
        grads[policy, factor] = head.weight.main_grad[7] / factor
    assert torch.equal(grads["fp32", 1.0], grads["fp32", 4096.0])
    assert (grads["fp16", 1.0] == 0).all()
    torch.testing.assert_close(grads["fp16", 4096.0], grads["fp32", 1.0], rtol=1e-2, atol=0)
