"""The monitors in whole runs: on every layout the figures of one process, also after losses and from a checkpoint."""

import pytest
import torch

from parallel3d.errors import Diverged
from tests.support import tiny_runs
from tests.support.kill_cells import kill_fault
from tests.support.kill_layouts import config_of
from tests.support.thread_kills import MONITORED, assert_same_run, run, undisturbed

CUBE = dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True)
LAYOUTS = {
    "tp2": (dict(tp_size=2), {}),
    "pp2": (dict(pp_size=2), {}),
    "dp4": (dict(dp_size=4), {}),
    "dp2 without ZeRO": (dict(dp_size=2, zero_stage=0), {}),
    "tp2 pp2 dp2": (CUBE, {}),
    "stages of 1 and 3 replicas": (dict(pp_size=2, stage_replicas=[1, 3]), {}),
    "copied key heads": (dict(tp_size=4), dict(num_key_value_heads=1)),
    "a tied embedding": (CUBE, dict(tie_word_embeddings=True)),
    "gpt2": (CUBE, dict(architecture="gpt2", qkv_bias=False)),
    "interleaved": (dict(pp_size=2, schedule="interleaved", virtual_stages=2), {}),
}
NORMS = ("param_norm", "variance_norm", "variance_max")


def norms_of(done):
    return [tuple(getattr(entry, name) for name in NORMS) for entry in done.entries]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norms_are_those_of_one_process(name):
    parallel, model = LAYOUTS[name]
    ours = norms_of(tiny_runs.train_in_threads(model=model, parallel=parallel))
    theirs = norms_of(tiny_runs.train_in_threads(model=model))
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(yours, rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy, tolerance", [("fp32", 1e-4), ("bf16", 0.05), ("fp16", 0.05), ("bf16_sr", 0.05)])
def test_the_norms_of_other_formats(policy, tolerance):
    changes = dict(precision=dict(policy=policy))
    ours, theirs = (norms_of(tiny_runs.train_in_threads(parallel=layout, **changes)) for layout in (CUBE, {}))
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(yours, rel=tolerance)


@pytest.mark.parametrize("sums", ["float", "exact"])
def test_the_norms_are_what_they_are_called(sums):
    """From the tensors themselves: the initial weights, and v after one update, (1 - beta2) (clipped gradient)^2."""
    done = tiny_runs.train_in_threads(steps=2, parallel=CUBE, precision=dict(sums=sums))
    first, second = norms_of(done)
    weights = torch.cat([weight.flatten() for weight in done.initial.values()])
    assert first == (pytest.approx(weights.norm().item(), rel=1e-12), 0.0, 0.0)
    gradients = torch.cat([gradient.flatten() for gradient in done.first_gradients.values()])
    assert done.entries[0].grad_norm > 0.5
    root_v = (gradients * 0.5 / (gradients.norm() + 1e-6)).abs() * (1 - 0.95) ** 0.5
    assert second[1:] == pytest.approx((root_v.sum().item(), root_v.max().item()), rel=1e-6)


@pytest.mark.parametrize("parallel", [dict(dp_size=4), dict(pp_size=2, stage_replicas=[1, 3])])
def test_exact_norms_are_the_same_bits_on_every_layout(parallel):
    ours, theirs = (
        norms_of(tiny_runs.train_in_threads(precision=dict(sums="exact"), parallel=layout)) for layout in (parallel, {})
    )
    assert ours == theirs


def test_norms_are_measured_when_they_are_due():
    done = tiny_runs.train_in_threads(monitor=dict(norms_every=2), parallel=dict(dp_size=2))
    assert [entry.param_norm is None for entry in done.entries] == [False, True, False]
    assert done.entries[2].variance_norm > 0
    never = tiny_runs.train_in_threads(monitor=dict(norms_every=None), parallel=dict(dp_size=2))
    assert [norms for norms in norms_of(never) if norms != (None, None, None)] == []
    assert never.losses == done.losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", ["forward", "all_reduce", "update", "all_gather"])
def test_whoever_leads_next_tells_the_same_figures(phase):
    """The leader dies; with exact sums all figures are bitwise those of the undisturbed run."""
    done = run(config_of("pp2-dp4"), [kill_fault(0, phase)])
    assert done.num_changes == 1 and set(MONITORED) <= done.steps[3].keys()
    assert_same_run(done, undisturbed("pp2-dp4"))


# --- divergence -------------------------------------------------------------------------------------------------------


def with_monitor(config, **changes):
    return config.model_copy(update=dict(monitor=config.monitor.model_copy(update=changes)))


def steep(**monitor):
    """A learning rate that lets the loss rise in the third step, to 1.18 times the lowest before."""
    config = with_monitor(config_of("pp2-dp4", num_steps=4), **monitor)
    rates = dict(optimizer=config.optimizer.model_copy(update=dict(learning_rate=1.0)))
    return config.model_copy(
        update=rates | dict(lr_schedule=config.lr_schedule.model_copy(update=dict(warmup_steps=0)))
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("faults", [[], [kill_fault(0, "all_reduce", 3)], [kill_fault(3, "update", 3)]])
def test_a_loss_that_rises_too_far_ends_the_run(faults):
    """On all ranks in the same step, also where one dies in it."""
    ratios = {step: record.get("loss_ratio", 0.0) for step, record in run(steep()).steps.items()}
    assert [step for step, ratio in ratios.items() if ratio > 1.1] == [3], ratios
    with pytest.raises(Diverged, match="diverged in step 3: the loss is .* times the lowest before") as told:
        run(steep(max_loss_ratio=1.1), faults)
    assert told.value.exit_code == 6


def test_a_warning_lets_the_run_go_on():
    done = run(steep(max_loss_ratio=1.1, divergence="warn"))
    assert sorted(done.steps) == [1, 2, 3, 4]
    assert any(text.startswith("warning: step 3: this looks like divergence: the loss is") for text in done.notices)


# --- evaluations ------------------------------------------------------------------------------------------------------


def with_run(config, **changes):
    return config.model_copy(update=dict(run=config.run.model_copy(update=changes)))


def test_an_evaluation_by_the_leaders_clock_is_folded_state():
    """A share of almost everything: whenever two steps are known as the next begins. Also where the leader dies."""
    config = config_of("pp2-dp4", num_steps=5)
    by_steps = run(with_run(config, evaluate_every=3))
    by_time = with_run(config, evaluate_every=None, evaluate_share=0.999999)
    for faults in ([], [kill_fault(0, "all_reduce", 3)], [kill_fault(0, "update", 3)], [kill_fault(3, "evaluate", 3)]):
        done = run(by_time, faults)
        assert done.run.evaluation == by_steps.run.evaluation and sorted(done.steps) == [1, 2, 3, 4, 5]
        assert done.evaluations == by_steps.evaluations


def test_evaluations_before_the_first_step_and_none_at_the_end():
    config = config_of("pp2-dp4")
    done = run(with_run(config, evaluate_every=None, evaluate_at_start=True, evaluate_at_end=False))
    assert list(done.evaluations) == [0]
    none = run(with_run(config, evaluate_every=None, evaluate_at_end=False))
    assert list(none.evaluations) == [] and none.run.evaluation is None


@pytest.mark.parametrize("layout", [dict(pp_size=2, stage_replicas=[1, 3]), dict(dp_size=4), CUBE])
def test_evaluations_are_sharded_and_give_the_same_result(layout):
    """At equal tensor-parallel size bitwise, where the weights are: losses of micro-batches are added exactly."""
    one, many = (
        tiny_runs.train_in_threads(steps=1, precision=dict(sums="exact"), parallel=parallel)
        for parallel in ({}, layout)
    )
    assert many.evaluation == (pytest.approx(one.evaluation, rel=1e-12) if layout is CUBE else one.evaluation)
