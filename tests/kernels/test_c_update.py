"""The update as a loop in C has the bits of the torch form: rules, formats, edge values, sizes, shares, ranges."""

import pytest
import torch

from parallel3d.kernels import c_loops
from parallel3d.kernels.c_update import add_norms, update_range
from parallel3d.kernels.range_kernels import C_RANGE_KERNELS, TORCH_RANGE_KERNELS
from parallel3d.kernels.update_table import UpdateTable
from parallel3d.optim.update_rules import UPDATE_RULES, default_settings
from parallel3d.optim.updater import build_updater
from tests.support.update_examples import (
    NARROW,
    STEP,
    WIDE,
    assert_same_bits,
    noise,
    range_of,
    trained,
    variance_of,
    whole,
)

pytestmark = pytest.mark.skipif(not c_loops.has_c_loops(), reason="no C compiler with OpenMP")
RULES = [name for name, rule in UPDATE_RULES.items() if rule.has_c_formula]


def run_both(rule, tensors, *, rounding, table, copies=False, measures=False):
    """Results of the torch form and of the loop, each (1 + num_states, n), and what the loop measured."""
    updater = build_updater(UPDATE_RULES[rule], default_settings(rule), form="c")
    torchs, ours = ([each.clone() for each in tensors] for _ in range(2))
    formula = type(updater)(rule=updater.rule)  # without torch's fused kernel
    formula.update(*torchs, STEP, weight_decay=0.1, noise=noise if rounding == "stochastic" else None)
    copy = torch.empty(len(ours[0]), dtype=NARROW) if copies else None
    measured = update_range(
        updater.range_formula,
        updater.rule.scalars(STEP, weight_decay=0.1),
        tuple(ours),
        table,
        grad_scale=STEP.grad_scale,
        rounding=rounding,
        copy=copy,
        variance=variance_of(rule),
        measures=measures,
    )
    expected, found = (torch.cat([weights[None], states]) for weights, states, _ in (torchs, ours))
    if copies:
        assert_same_bits(copy, expected[0].bfloat16())
    return expected, found, measured


@pytest.mark.parametrize("grad_dtype", [NARROW, WIDE], ids=str)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest", "none"])
@pytest.mark.parametrize("rule", RULES)
def test_a_million_elements_and_all_pairs_of_edge_values(rule, rounding, grad_dtype):
    dtype = WIDE if rounding == "none" else NARROW
    tensors = range_of(rule, 1_000_003, dtype, grad_dtype=grad_dtype)
    table = whole(1_000_003, block=1024)
    expected, found, _ = run_both(rule, tensors, rounding=rounding, table=table, copies=rounding == "none")
    assert_same_bits(found, expected)
    if rounding == "stochastic":
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("num_elements", [1, 15, 16, 1023, 1025, 4112])
def test_sizes(num_elements):
    tensors = range_of("adamw", num_elements, NARROW)
    expected, found, _ = run_both("adamw", tensors, rounding="stochastic", table=whole(num_elements, block=1024))
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_it_measures_what_it_stores(rule, num_threads):
    """1e-6: sums in fp32 over blocks, in another order; the number of threads decides no bit."""
    num_states, before = len(UPDATE_RULES[rule].states), torch.get_num_threads()
    weights, states, grads = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed, shape in enumerate([(9001,), (num_states, 9001), (9001,)])
    )
    states[-1].square_()
    try:
        torch.set_num_threads(num_threads)
        _, found, measured = run_both(
            rule, (weights, states, grads), rounding="stochastic", table=whole(9001, block=1024), measures=True
        )
    finally:
        torch.set_num_threads(before)
    _, _, again = run_both(
        rule, (weights, states, grads), rounding="stochastic", table=whole(9001, block=1024), measures=True
    )
    assert torch.equal(measured, again)
    squared, total, largest = add_norms([measured]).tolist()
    assert squared == pytest.approx(found[0].double().square().sum().item(), rel=1e-6)
    variance = variance_of(rule)
    roots = torch.zeros(1) if variance is None else found[1 + variance].double().sqrt()
    assert total == pytest.approx(roots.sum().item(), rel=1e-6)
    assert largest == pytest.approx(roots.max().item(), rel=1e-6)


def test_an_empty_range_measures_nothing():
    assert add_norms([torch.zeros(3, 0)]).tolist() == [0.0, 0.0, 0.0]
    table = UpdateTable.build([], [])
    tensors = torch.zeros(0, dtype=NARROW), torch.zeros(2, 0, dtype=NARROW), torch.zeros(0)
    _, found, measured = run_both("adamw", tensors, rounding="nearest", table=table, measures=True)
    assert found.numel() == 0 and measured.shape == (3, 0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("policy", ["bf16_sr", "bf16_pure", "bf16"])
@pytest.mark.parametrize("tp_size, dp_size, backups", [(1, 1, 0), (2, 1, 0), (4, 1, 0), (2, 3, 1)])
def test_buckets_of_many_parameters(tp_size, dp_size, backups, policy, kind, monkeypatch):
    """Padding, both dimensions, copied heads, ranges with borders inside parameters; a step that updates nothing."""
    monkeypatch.setattr("parallel3d.optim.updater.KERNELS", {})  # torch's fused kernel rounds in its own places
    settings = dict(tp_size=tp_size, dp_size=dp_size, zero_backups=backups, policy=policy, kind=kind)
    for mine, theirs in zip(trained(C_RANGE_KERNELS, **settings), trained(TORCH_RANGE_KERNELS, **settings)):
        assert all(torch.equal(mine[0][name], theirs[0][name]) for name in theirs[0])
        for ours, other in zip(mine[1], theirs[1]):
            assert all(torch.equal(ours[span], other[span]) for span in other)
        for (norm, state), (other_norm, other_state) in zip(mine[2], theirs[2]):
            assert norm == pytest.approx(other_norm, rel=1e-6)
            assert state.squared_weights.value == pytest.approx(other_state.squared_weights.value, rel=1e-6)
            assert state.variance.value == pytest.approx(other_state.variance.value, rel=1e-6)
            assert state.variance_max == pytest.approx(other_state.variance_max, rel=1e-6)
