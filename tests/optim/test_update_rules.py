"""Lion and Muon have their papers' formulas, and the bits of one process on layouts, through a death and a resume."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from parallel3d.comparison.run_result import RunResult
from parallel3d.config.schema import Config
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.optim.bucket_plan import plan_buckets
from parallel3d.optim.kernels import KERNELS
from parallel3d.optim.update_rules import UPDATE_RULES, default_settings
from parallel3d.optim.update_rules.lion import Lion
from parallel3d.optim.update_rules.muon import Muon, orthogonalize
from parallel3d.optim.update_rules.update_rule import UpdateStep, take_root
from parallel3d.optim.updater import Updater, build_updater
from parallel3d.parallel.sharding import ParamSharding
from tests.support import tiny_runs
from tests.support.kill_cells import Outcome, kill_fault
from tests.support.saved_layouts import assert_equal, read_all, run_layout, save
from tests.support.thread_kills import assert_same_run, outcome_of, run

NEW = ("lion", "muon")
LEARNING_RATES = {"lion": 1e-3, "muon": 1e-2}
LAYOUTS = {
    "pp2": dict(pp_size=2),
    "dp4": dict(dp_size=4),
    "dp4-zero0": dict(dp_size=4, zero_stage=0),
    "dp3-one-bucket": dict(dp_size=3, bucket_mib=100.0),
    "pp2-dp2-small-buckets": dict(pp_size=2, dp_size=2, bucket_mib=0.001),
    "pp2-dp2-overlap": dict(pp_size=2, dp_size=2, overlap_param_gather=True),
    "stages-1-3": dict(pp_size=2, stage_replicas=[1, 3]),
}
MODEL = dict(num_attention_heads=4, num_key_value_heads=2)


def sections(kind: str, policy: str, parallel: dict[str, object]) -> dict[str, dict[str, object]]:
    return dict(
        model=MODEL,
        parallel=parallel,
        optimizer=dict(kind=kind, learning_rate=LEARNING_RATES[kind]),
        precision=dict(policy=policy, sums="exact"),
        elastic=dict(zero_backups=1),
    )


@cache
def trained(kind: str, policy: str, layout: str | None) -> RunResult:
    return tiny_runs.train_in_threads(**sections(kind, policy, LAYOUTS[layout] if layout else {}))


# --- the run ----------------------------------------------------------------------------------------------------------


@pytest.mark.each_value(rest=12)
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16_sr"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", NEW)
def test_the_layout_decides_no_bit(kind: str, layout: str, policy: str) -> None:
    ours, theirs = trained(kind, policy, layout), trained(kind, policy, None)
    assert ours.entries == theirs.entries and ours.evaluation == theirs.evaluation
    assert [name for name, weight in theirs.weights.items() if not torch.equal(ours.weights[name], weight)] == []


@pytest.mark.parametrize("kind", NEW)
def test_it_learns(kind: str) -> None:
    first, *_, last = trained(kind, "fp32", None).entries
    assert last.loss < first.loss - 0.01


@pytest.mark.each_value
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("kind", NEW)
def test_tensor_parallel_ranks_update_whole_matrices(kind: str, tp_size: int) -> None:
    """Four ranks hold copies of two key heads. fp64: partial products in another order differ by some 1e-15 a step;
    where a gradient is only rounding noise, Lion's sign turns that into a whole step."""
    one = tiny_runs.train_in_threads(**sections(kind, "fp64", {}))
    many = tiny_runs.train_in_threads(**sections(kind, "fp64", dict(tp_size=tp_size, dp_size=2)))
    for name, weight in one.weights.items():
        apart = (many.weights[name] - weight).abs()
        if kind == "muon":
            assert apart.max() < 1e-9, name
        else:
            assert (apart > 1e-9).double().mean() < 0.001, name


KILLED = {
    "pp2-dp2-tp2": dict(pp_size=2, dp_size=2, tp_size=2),
    "pp2-dp4": dict(pp_size=2, dp_size=4),
    "dp3-tp2": dict(dp_size=3, tp_size=2),
}


def kill_config(kind: str, layout: str, policy: str = "fp32") -> Config:
    return tiny_runs.make_config(
        model=dict(hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2),
        parallel=dict(bucket_mib=0.003, **KILLED[layout]),
        batch=dict(global_batch_size=2 * KILLED[layout]["dp_size"], micro_batch_size=1, sequence_length=4),
        optimizer=dict(kind=kind, learning_rate=LEARNING_RATES[kind]),
        precision=dict(policy=policy, sums="exact"),
        elastic=dict(enabled=True, zero_backups=1),
        run=dict(num_steps=3, evaluate_every=2),
        monitor=dict(norms_every=1),
    )


@cache
def undisturbed(kind: str, layout: str, policy: str) -> object:
    return run(kill_config(kind, layout, policy))


@pytest.mark.sample(4, rest=16)
@pytest.mark.parametrize("phase", ["backward", "reduce_scatter", "backup", "all_reduce", "update", "all_gather"])
@pytest.mark.parametrize("layout", KILLED)
@pytest.mark.parametrize("kind", NEW)
@pytest.mark.parametrize("rank, policy", [(1, "fp32"), (2, "bf16_sr")])
def test_a_death_changes_no_bit(kind: str, layout: str, phase: str, rank: int, policy: str) -> None:
    done = run(kill_config(kind, layout, policy), [kill_fault(rank, phase)])
    assert outcome_of(done) == Outcome(frozenset({rank}), 1, True)
    assert_same_run(done, undisturbed(kind, layout, policy))


@pytest.mark.parametrize("kind", NEW)
def test_norms_are_measured_of_what_there_is(kind: str) -> None:
    """Lion keeps no second moments; Muon's embeddings, norms and head do."""
    steps = undisturbed(kind, "pp2-dp4", "fp32").steps.values()
    assert all(record["param_norm"] > 0 for record in steps)
    assert all((record.get("variance_norm") is None) == (kind == "lion") for record in steps)


# --- checkpoints ------------------------------------------------------------------------------------------------------

SAVED = [
    (dict(pp_size=2, dp_size=2), dict(dp_size=3)),
    (dict(dp_size=4, bucket_mib=0.001), dict(pp_size=2, stage_replicas=[1, 2], zero_stage=0)),
    (dict(tp_size=2, dp_size=2), dict(tp_size=2, pp_size=2)),
]


@pytest.mark.each_value
@pytest.mark.parametrize("policy", ["bf16", "bf16_sr"])
@pytest.mark.parametrize("first, second", SAVED)
@pytest.mark.parametrize("kind", NEW)
def test_a_run_goes_on_from_a_checkpoint_of_another_layout(
    tmp_path: Path, kind: str, first: dict, second: dict, policy: str
) -> None:
    before, after = (tiny_runs.make_config(**sections(kind, policy, parallel)) for parallel in (first, second))
    _, snapshots, runtimes = run_layout(before, steps=1)
    folder = save(tmp_path, snapshots, runtimes[0])
    resumed, _, _ = run_layout(after, start=folder, steps=1)
    whole, _, _ = run_layout(before, steps=2)
    assert_equal(resumed, whole)
    kinds = {kind for kind, _ in read_all(folder)}
    assert kinds == {"lion": {"weight", "moment1"}, "muon": {"weight", "momentum", "moment1", "moment2"}}[kind]


def test_a_checkpoint_of_another_rule_is_refused(tmp_path: Path) -> None:
    _, snapshots, runtimes = run_layout(tiny_runs.make_config(**sections("lion", "fp32", {})), steps=1)
    folder = save(tmp_path, snapshots, runtimes[0])
    adamw = tiny_runs.make_config(model=MODEL)
    with pytest.raises(CheckpointError, match="it holds moment1, and adamw needs moment1, moment2. Set optimizer.kind"):
        run_layout(adamw, start=folder)


# --- the formulas -----------------------------------------------------------------------------------------------------

STEP = UpdateStep(number=2, learning_rate=0.01, peak_learning_rate=0.04, grad_scale=0.5)


def test_lion_is_the_papers_algorithm() -> None:
    numbers = torch.Generator().manual_seed(1)
    weight, momentum, grad = (torch.randn(100, dtype=torch.float64, generator=numbers) for _ in range(3))
    weights, states = weight.clone(), momentum.clone().unsqueeze(0)
    Updater(rule=Lion()).update(weights, states, grad, STEP, weight_decay=0.3)
    change = torch.sign(0.9 * momentum + 0.1 * 0.5 * grad)
    assert torch.allclose(weights, weight - 0.01 * (change + 0.3 * weight), rtol=1e-14, atol=0)
    assert torch.allclose(states[0], 0.99 * momentum + 0.01 * 0.5 * grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (9, 9)])
def test_newton_schulz_makes_singular_values_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalize(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.25
    assert torch.allclose(found, u @ torch.diag((u.t() @ found @ v.t()).diag()) @ v, atol=1e-10)  # the same directions


def test_muon_is_the_authors_algorithm() -> None:
    """https://github.com/KellerJordan/Muon: lerp, Nesterov, orthogonalize, scale by rows / columns."""
    numbers = torch.Generator().manual_seed(3)
    weight, momentum, grad = (torch.randn(12, 5, dtype=torch.float64, generator=numbers) for _ in range(3))
    rule = Muon()
    direction = rule.direction(grad * 0.5, (momentum,))
    weights, states = weight.clone().flatten(), momentum.clone().view(1, -1)
    Updater(rule=rule).update(weights, states, grad.view(-1), STEP, weight_decay=0.3, directions=direction.view(-1))
    lerped = momentum.lerp(0.5 * grad, 0.05)
    change = orthogonalize((0.5 * grad).lerp(lerped, 0.95)) * (12 / 5) ** 0.5
    assert torch.allclose(states.view(12, 5), lerped, rtol=1e-13, atol=0)
    assert torch.allclose(weights.view(12, 5), weight * (1 - 0.005 * 0.3) - 0.005 * change, rtol=1e-12, atol=1e-14)


# --- plans and settings -----------------------------------------------------------------------------------------------


def test_ranges_of_matrices_begin_and_end_with_parameters() -> None:
    shardings = [
        ParamSharding(name="embedding", shape=(100, 8), dim=0, padded=True, is_token_table=True),
        *(ParamSharding(name=str(number), shape=(8 * (number % 3 + 1), 8), dim=0) for number in range(7)),
        ParamSharding(name="norm", shape=(8,), is_norm_or_bias=True),
    ]
    plans = plan_buckets(shardings, tp_size=2, bucket_elements=10**6, decay_norms_and_biases=False, matrix_wise=True)
    (plan,) = (plan for plan in plans if plan.key.is_matrix_wise)
    assert {slot.name for slot in plan.param_slots} == set("0123456")
    for num_ranges in range(1, 12):
        ranges = [plan.range_of(number, num_ranges) for number in range(num_ranges)]
        assert ranges[0].start == 0 and ranges[-1].stop == plan.length(num_ranges) == plan.length(1)
        assert all(a.stop == b.start for a, b in zip(ranges, ranges[1:]))
        starts = {slot.offset for slot in plan.param_slots} | {plan.length(1)}
        assert all(each.start in starts for each in ranges)
        longest = max(slot.length for slot in plan.param_slots)
        assert max(map(len, ranges)) <= plan.length(1) / num_ranges + longest


def test_settings_are_those_of_the_rule() -> None:
    lion = tiny_runs.make_config(optimizer=dict(kind="lion")).optimizer
    assert (lion.beta1, lion.beta2, lion.eps, lion.momentum) == (0.9, 0.99, None, None)
    assert tiny_runs.make_config().optimizer.beta2 == 0.95
    with pytest.raises(ConfigError, match="optimizer.eps = 1e-06: is not a setting of optimizer.kind lion"):
        tiny_runs.make_config(optimizer=dict(kind="lion", eps=1e-6))
    with pytest.raises(ConfigError, match="has no kernel for optimizer.kind lion"):
        tiny_runs.make_config(optimizer=dict(kind="lion", backend="apex"), precision=dict(policy="fp32"))


@pytest.mark.parametrize("name", UPDATE_RULES)
def test_every_rule_has_its_fields_and_its_kernels(name: str) -> None:
    rule = UPDATE_RULES[name]
    assert build_updater(rule, default_settings(name)).rule == rule()
    fields = type(tiny_runs.make_config().optimizer).model_fields
    for setting, field in rule.model_fields.items():
        assert f"{name} ({field.default:g} by default): {field.description}" in (fields[setting].description or "")
    for backend in rule.backends:
        assert backend == "torch" or (name, backend) in KERNELS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_are_rounded_right(dtype: torch.dtype) -> None:
    """Every square of a number of few bits has an exact root, and that of an fp32 number is that of fp64, rounded."""
    numbers = torch.Generator().manual_seed(5)
    exact = torch.randint(1, 2**12, (1000,), generator=numbers).to(dtype)
    assert torch.equal(take_root(exact.square()), exact)
    values = torch.rand(10_000, generator=numbers)
    wide = torch.tensor([math.sqrt(value) for value in values.tolist()], dtype=torch.float64)
    assert torch.equal(take_root(values.to(dtype)), wide.to(dtype))
