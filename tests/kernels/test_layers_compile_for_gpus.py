"""The layers' kernels at the widths of real models: no register is spilled, and memory is read in vectors."""

from itertools import product

import pytest

from tests.support.kernel_compiler import KernelCase, compile_kernels

pytest.importorskip("triton")
NORMS, ACTIVATIONS, ROTARY, LOSS, DROPOUT, EMBEDDING, SUMS = (
    f"parallel3d.kernels.triton_{name}"
    for name in ("norms", "activations", "rotary", "cross_entropy", "dropout", "embedding", "row_sums")
)
POINTERS = "*bf16"
SUMS_OF_ROWS = ("_sum_part", "_sum_parts", "_statistics", "_add_rows")
"""Kernels that write less than they read."""


def norm_cases(width, has_mean, has_residual):
    """As in parallel3d/kernels/triton_norms.py, in bf16."""
    from parallel3d.kernels.triton_math import row_block, warps_for

    block = row_block(width)
    common = dict(WIDTH=width, HAS_MEAN=has_mean, BLOCK=block, WIDE="float32")
    options = dict(num_warps=warps_for(block))
    optional = {} if has_residual else {"delta": None}
    names = ["x", *(["delta"] if has_residual else []), "weight", "bias", "total", "y"]
    yield KernelCase(
        module=NORMS,
        kernel="_norm",
        signature={name: POINTERS for name in names} | dict(mean="*fp32", scale="*fp32"),
        constants=common | optional | dict(EPS=1e-5, HAS_DELTA=has_residual),
        aligned=(*names, "mean", "scale"),
        options=options,
    )
    names = ["grad", "total", "weight", *(["residual_grad"] if has_residual else []), "result"]
    optional = {} if has_residual else {"residual_grad": None}
    yield KernelCase(
        module=NORMS,
        kernel="_norm_grads",
        signature={name: POINTERS for name in names} | dict(mean="*fp32", scale="*fp32", parts="*fp32", num_rows="i32"),
        constants=common | optional | dict(HAS_RESIDUAL=has_residual, BLOCK_ROWS=32),
        aligned=(*names, "mean", "scale", "parts"),
        options=options,
    )


def sum_cases(width, num_tiles):
    constants = dict(WIDTH=width, PART_ROWS=256, ROWS=16, COLUMNS=128, WIDE="float32")
    yield KernelCase(
        module=SUMS,
        kernel="_sum_part",
        signature=dict(x=POINTERS, parts="*fp32", num_rows="i32"),
        constants=constants,
        aligned=("x", "parts"),
    )
    yield KernelCase(
        module=SUMS,
        kernel="_sum_parts",
        signature=dict(parts="*fp32", sums="*fp32", num_parts="i32"),
        constants=dict(WIDTH=width, NUM_TILES=num_tiles, ROWS=64, COLUMNS=32),
        aligned=("parts", "sums"),
    )


def activation_cases(width):
    for has_grad, is_one in product((False, True), repeat=2):
        names = ["grad", "result"] if has_grad else []
        optional = dict(HAS_GRAD=has_grad) | ({} if has_grad else dict(grad=None, result=None))
        gated = optional | dict(IS_GELU=is_one, WIDTH=width)
        yield elementwise(ACTIVATIONS, "_gate_times", [*names, "gate_up", "y"], gated)
        yield elementwise(
            ACTIVATIONS, "_gelu", [*names, "x", "y"], optional | dict(IS_EXACT=is_one), num_elements="i32"
        )


def rotary_cases(heads, kv_heads, size):
    rows = heads + 2 * kv_heads
    rotated = (heads + kv_heads) * size
    constants = dict(STRIDE=rows * size, ROTATED_STRIDE=rows * size, NUM_PAIRS=rotated // 2, HALF=size // 2)
    yield elementwise(ROTARY, "_rotate", ["x", "result"], constants, cos="*fp32", sin="*fp32", seq="i32")
    strides = {f"d{name}_{part}": "i32" for name in "qkv" for part in ("batch", "token", "head")}
    constants = dict(NUM_QUERY_HEADS=heads, NUM_KV_HEADS=kv_heads, HALF=size // 2)
    names = ["dq", "dk", "dv", "grad"]
    yield elementwise(ROTARY, "_packed_grads", names, constants, cos="*fp32", sin="*fp32", seq="i32", **strides)


def cross_entropy_cases(num_logits):
    others = dict(targets="*i64", numbers="*fp32", num_rows="i32", stride="i32")
    constants = dict(NUM_LOGITS=num_logits, LENGTH=-(-num_logits // 64) * 64)
    yield elementwise(LOSS, "_statistics", ["logits"], constants, block=4096, **others)
    yield elementwise(
        LOSS, "_gradient", ["logits"], constants | dict(HAS_GRADIENT=True), losses="*fp32", factor="fp32", **others
    )


def dropout_cases(width):
    others = dict(keys="*i64", first_token="i32", sequence_length="i32")
    constants = dict(THRESHOLD=429496730, SCALE=1 / 0.9, WIDTH=width)
    yield elementwise(DROPOUT, "_drop", ["x", "result"], constants, **others)


def embedding_cases(width):
    others = dict(order="*i64", bounds="*i64")
    yield elementwise(
        EMBEDDING, "_add_rows", ["buffer", "rows"], dict(WIDTH=width, ROWS=8), block=256, warps=4, **others
    )


def elementwise(module, kernel, names, constants, block=1024, warps=None, **others):
    """A kernel in bf16 with 8 elements for a thread; all pointers and integers are divisible by 16."""
    return KernelCase(
        module=module,
        kernel=kernel,
        signature={name: POINTERS for name in names} | others,
        constants=constants | dict(BLOCK=block, WIDE="float32"),
        aligned=(*names, *(name for name, kind in others.items() if kind != "fp32")),
        options=dict(num_warps=warps or block // 256),
    )


CASES = [
    *(
        case
        for width in (768, 2048, 4096, 8192)
        for has_mean in (False, True)
        for has_residual in (False, True)
        for case in norm_cases(width, has_mean, has_residual)
    ),
    *sum_cases(4096, 8),
    *activation_cases(11008),
    *rotary_cases(32, 32, 128),
    *rotary_cases(32, 8, 64),
    *cross_entropy_cases(32000),
    *dropout_cases(768),
    *embedding_cases(4096),
    *cross_entropy_cases(50257),
]


@pytest.mark.full
def test_nothing_is_spilled_and_loads_are_vectors():
    found = compile_kernels(CASES)
    assert len(found) == 3 * len(CASES)
    spilled = [(each.kernel, each.architecture) for each in found if each.spilled_bytes or each.local_bytes]
    assert spilled == []
    # 8 numbers of bf16 in an access, and 4 of fp32: whatever is narrower is a number for each row
    for each in found:
        assert max(each.accesses("ld")) == 128, each.kernel
        assert max(each.accesses("st")) == (32 if each.kernel in SUMS_OF_ROWS else 128), each.kernel
