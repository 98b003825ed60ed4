"""The kernel of the update has the bits of the torch form: rules, formats, edge values, sizes, shares, ranges."""

import math

import pytest
import torch

from parallel3d.inprocess.world import run_threads
from parallel3d.kernels.launch_kernel import launch_triton
from parallel3d.kernels.range_kernels import TORCH_RANGE_KERNELS, triton_range_kernels
from parallel3d.layers.global_index import global_index
from parallel3d.optim.bucket_plan import ParamSlot
from parallel3d.optim.update_pieces import pieces_of
from parallel3d.optim.update_rules import UPDATE_RULES, default_settings
from parallel3d.optim.updater import build_updater
from parallel3d.parallel.sharding import FusedBlock, ParamSharding, TpShard
from tests.support.kernel_compiler import KernelCase, compile_kernels
from tests.support.kernel_forms import DEVICE
from tests.support.optimizer_ranks import SHARDINGS, Rank
from tests.support.update_examples import (
    INFINITY,
    NAN,
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

pytest.importorskip("triton")
pytestmark = [  # the warnings are numpy's, of overflows in the interpreter
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
on_host = pytest.mark.skipif(DEVICE == "cuda", reason="ranks that are threads, on the CPU")
RULES = [name for name, rule in UPDATE_RULES.items() if rule.has_triton_formula]


def run_both(rule, tensors, *, rounding, table, copies=False, measures=False):
    """Results of the torch form and of the kernel, each (1 + num_states, n), and what the kernel measured."""
    from parallel3d.kernels.triton_update import update_range

    updater = build_updater(UPDATE_RULES[rule], default_settings(rule), form="triton")
    torchs, ours = ([each.clone() for each in tensors] for _ in range(2))
    plain = build_updater(UPDATE_RULES[rule], default_settings(rule))
    formula = type(plain)(rule=plain.rule)  # without torch's fused kernel
    formula.update(*torchs, STEP, weight_decay=0.1, noise=noise if rounding == "stochastic" else None)
    ours = [each.to(DEVICE) for each in ours]
    copy = torch.empty(len(ours[0]), dtype=NARROW, device=DEVICE) if copies else None
    measured = update_range(
        launch_triton,
        updater.range_formula,
        updater.rule.scalars(STEP, weight_decay=0.1),
        tuple(ours),
        table.to(torch.device(DEVICE)),
        grad_scale=STEP.grad_scale,
        rounding=rounding,
        copy=copy,
        variance=variance_of(rule),
        measures=measures,
    )
    expected, found = (torch.cat([weights[None], states]).cpu() for weights, states, _ in (torchs, ours))
    if copies:
        assert_same_bits(copy.cpu(), expected[0].bfloat16())
    return expected, found, measured


# --- a range with one key ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["stochastic", "nearest", "none"])
@pytest.mark.parametrize("rule", RULES)
def test_all_pairs_of_edge_values(rule, rounding):
    dtype = WIDE if rounding == "none" else NARROW
    tensors = range_of(rule, 10_000, dtype, grad_dtype=WIDE)
    expected, found, _ = run_both(rule, tensors, rounding=rounding, table=whole(10_000), copies=rounding == "none")
    assert_same_bits(found, expected)
    if rounding == "stochastic":
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("num_elements", [1, 15, 16, 1023, 1025, 4112])
def test_sizes(num_elements):
    tensors = range_of("adamw", num_elements, NARROW)
    expected, found, _ = run_both("adamw", tensors, rounding="stochastic", table=whole(num_elements, block=1024))
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_a_million_elements(rule):
    tensors = range_of(rule, 1_000_000, NARROW)
    table = whole(1_000_000, block=1024 if DEVICE == "cuda" else 1 << 17)
    expected, found, _ = run_both(rule, tensors, rounding="stochastic", table=table)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("rule", RULES)
def test_it_measures_what_it_stores(rule):
    """1e-6: sums in fp32 over blocks, in another order."""
    from parallel3d.kernels.triton_sums import add_norms

    weights, states, grads = (
        torch.randn(*shape).bfloat16() for shape in ((9000,), (len(UPDATE_RULES[rule].states), 9000), (9000,))
    )
    states[-1].square_()
    _, found, measured = run_both(
        rule, (weights, states, grads), rounding="stochastic", table=whole(9000, block=1024), measures=True
    )
    squared, total, largest = add_norms(launch_triton, [measured]).tolist()
    assert squared == pytest.approx(found[0].double().square().sum().item(), rel=1e-6)
    variance = variance_of(rule)
    roots = torch.zeros(1) if variance is None else found[1 + variance].double().sqrt()
    assert total == pytest.approx(roots.sum().item(), rel=1e-6)
    assert largest == pytest.approx(roots.max().item(), rel=1e-6)


# --- shares of parameters ---------------------------------------------------------------------------------------------

HEADS = tuple(FusedBlock(name=name, size=16) for name in "qkv")
SHARES = [
    *SHARDINGS,
    ParamSharding(name="three", shape=(3, 8, 5), dim=1),
    ParamSharding(name="last", shape=(3, 8), dim=1, padded=True),
    ParamSharding(name="heads", shape=(48, 16), dim=0, fused_blocks=HEADS),
]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("sharding", SHARES, ids=lambda sharding: sharding.name)
def test_pieces_have_the_indices_of_the_share(sharding, tp_size):
    """On every range that begins and ends in the parameter's middle; padding, whose index is negative, may be left out
    or have any."""
    for rank in range(tp_size):
        tp = TpShard(rank=rank, size=tp_size)
        slot = ParamSlot(name=sharding.name, offset=32, shape=sharding.local_shape(tp_size))
        index = global_index(sharding, range(slot.length), tp=tp)
        for span in (range(0, 1000), range(32, 32 + slot.length), range(40, 40 + slot.length // 2), range(500, 501)):
            found = torch.full((len(span),), -1)
            for piece in pieces_of(sharding, slot, span, tp):
                element = torch.arange(piece.start, piece.stop) - piece.origin
                assert (found[piece.start : piece.stop] == -1).all()
                found[piece.start : piece.stop] = (
                    element // piece.width * piece.stride + element % piece.width + piece.shift
                )
            expected = torch.full((1000,), -1)
            expected[32 : 32 + slot.length] = index.clamp(min=-1)
            expected = expected[span.start : span.stop]
            assert torch.equal(torch.where(expected < 0, -1, found), expected)


@on_host
@pytest.mark.sample(4, rest=0)
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("policy", ["bf16_sr", "bf16_pure"])
@pytest.mark.parametrize("tp_size, dp_size, backups", [(1, 1, 0), (2, 1, 0), (4, 1, 0), (2, 3, 1)])
def test_buckets_of_many_parameters(tp_size, dp_size, backups, policy, kind):
    """Padding, both dimensions, copied heads, ranges with borders inside parameters; a step that updates nothing."""
    settings = dict(tp_size=tp_size, dp_size=dp_size, zero_backups=backups, policy=policy, kind=kind)
    for mine, theirs in zip(
        trained(triton_range_kernels(launch_triton), **settings), trained(TORCH_RANGE_KERNELS, **settings)
    ):
        assert all(torch.equal(mine[0][name], theirs[0][name]) for name in theirs[0])
        for ours, other in zip(mine[1], theirs[1]):
            assert all(torch.equal(ours[span], other[span]) for span in other)
        for (norm, state), (other_norm, other_state) in zip(mine[2], theirs[2]):
            assert norm == pytest.approx(other_norm, rel=1e-6)
            assert state.squared_weights.value == pytest.approx(other_state.squared_weights.value, rel=1e-6)
            assert state.variance.value == pytest.approx(other_state.variance.value, rel=1e-6)
            assert state.variance_max == pytest.approx(other_state.variance_max, rel=1e-6)


@on_host
def test_norms_from_an_update_are_those_of_the_ranges_that_it_updated():
    """Until new ranges are installed; then the state is measured in a pass of its own."""

    def body(number, world):
        rank = Rank(number, world, tp_size=1, dp_size=2, policy="bf16_sr", kernels=triton_range_kernels(launch_triton))
        assert all(bucket.updated_norms is None for bucket in rank.buckets)
        rank.step(0)
        assert all(bucket.updated_norms is not None for bucket in rank.buckets)
        from_update = rank.state_norms()
        for bucket in rank.buckets:
            bucket.install_shards(bucket.shards, 2)
            assert bucket.updated_norms is None
        return from_update, rank.state_norms()

    for ours, other in run_threads(2, body):
        assert ours.squared_weights.value == pytest.approx(other.squared_weights.value, rel=1e-6)
        assert (ours.variance.value, ours.variance_max) == pytest.approx(
            (other.variance.value, other.variance_max), rel=1e-6
        )


@pytest.mark.parametrize("bad", [NAN, INFINITY])
def test_what_is_no_number_shows_in_norms(bad):
    from parallel3d.optim.bucket_norms import _norms_of_updates

    kernels = triton_range_kernels(launch_triton)
    values = torch.ones(5000, device=DEVICE).bfloat16()
    values[4321] = bad
    assert not kernels.squared_norms([torch.ones(3, device=DEVICE).bfloat16(), values]).isfinite().any()
    partials = torch.ones(3, 5000, device=DEVICE)
    partials[1:, 4321] = bad
    norms = _norms_of_updates(kernels.add_norms([partials, torch.ones(3, 7, device=DEVICE)]).tolist)
    assert norms.squared_weights.value == 5007
    assert not math.isfinite(norms.variance.value) and not math.isfinite(norms.variance_max)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_squared_norms(dtype):
    """1e-6: sums in fp32 over blocks of 4096."""

    parts = [torch.randn(size, device=DEVICE).to(dtype) for size in (1, 4096, 0, 9001)]
    found = triton_range_kernels(launch_triton).squared_norms(parts)
    assert found.sum().item() == pytest.approx(sum(part.double().square().sum().item() for part in parts), rel=1e-6)
    assert triton_range_kernels(launch_triton).squared_norms([]).sum() == 0


# --- the compiled kernel ----------------------------------------------------------------------------------------------


def compiled_case(rule, rounding, *, has_rows=False, num_rows=1):
    narrow = "*fp32" if rounding == "none" else "*bf16"
    tensors = dict(weights=narrow, states=narrow, grads="*bf16", copy="*bf16", partials="*fp32", table="*i64")
    rule_class = UPDATE_RULES[rule]
    numbers = rule_class(**default_settings(rule)).scalars(STEP, weight_decay=0.1)
    return KernelCase(
        module="parallel3d.kernels.triton_update",
        kernel="_update_range",
        signature=tensors | dict(row_length="i64", grad_scale="fp32", numbers=["fp32"] * len(numbers)),
        constants=dict(
            FORMULA=f"parallel3d.optim.update_rules.triton_{rule}:update_values",
            NUM_STATES=len(rule_class.states),
            ROUNDING=rounding,
            COPIES=rounding == "none",
            MEASURES=True,
            VARIANCE=-1 if variance_of(rule) is None else variance_of(rule),
            NUM_ROWS=num_rows,
            IS_ALIGNED=True,
            HAS_ROWS=has_rows,
            BLOCK=1024,
        ),
        aligned=(*tensors, "row_length"),
        options=dict(num_warps=4, enable_fp_fusion=False),
    )


@pytest.mark.full
def test_compiles_for_all_architectures():
    """No spill, no local memory, no fused multiply-add; a thread moves eight elements of a tensor in 128 bits."""
    cases = [
        compiled_case("adamw", "stochastic"),
        compiled_case("adamw", "stochastic", has_rows=True, num_rows=16),
        compiled_case("adamw", "nearest"),
        compiled_case("adamw", "none"),
        compiled_case("lion", "stochastic"),
    ]
    for made in compile_kernels(cases):
        assert made.spilled_bytes == made.local_bytes == 0
        assert made.num_fused_multiply_adds == 0
        tensors_moved = made.accesses("ld").count(128), made.accesses("st").count(128)
        assert min(tensors_moved) >= 2 and 16 not in (*made.accesses("ld"), *made.accesses("st"))


@pytest.mark.full
def test_sums_compile_for_all_architectures():
    """Nothing is spilled; bf16 gradients are read in 128 bits."""
    module, options = "parallel3d.kernels.triton_sums", dict(num_warps=4)
    squares = KernelCase(
        module=module,
        kernel="_square_sums_of_blocks",
        signature=dict(values="*bf16", sums="*fp32", n="i32"),
        constants=dict(BLOCK=4096),
        aligned=("values", "sums", "n"),
        options=options,
    )
    others = KernelCase(
        module=module,
        kernel="_reduce_blocks",
        signature=dict(rows="*fp32", reduced="*fp64", n="i32"),
        constants=dict(MAX_ROW=2, BLOCK=4096),
        aligned=("rows", "reduced"),
        options=options,
    )
    for made in compile_kernels([squares, others]):
        assert made.spilled_bytes == made.local_bytes == 0
        assert made.kernel == "_reduce_blocks" or set(made.accesses("ld")) == {128}
