"""The activations of feed-forward blocks, one kernel forward and one backward; a program has a part of a row."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel3d.kernels.triton_math import WIDE, sigmoid, warps_for, wide_dtype

BLOCK = 1024


def gate_times(launch, gate_up, *, is_gelu):
    """act(gate) * up: SwiGLU, or GeGLU by the hyperbolic tangent."""
    return _gated_launch(launch, None, gate_up, is_gelu)[1]


def gate_times_grads(launch, grad, gate_up, _kept, *, is_gelu):
    return _gated_launch(launch, grad.contiguous(), gate_up, is_gelu)


def _gated_launch(launch, grad, gate_up, is_gelu):
    """The gradient of [gate | up], if there is one of the result, and the result."""
    gate_up, (num_rows, both) = gate_up.contiguous(), gate_up.shape
    y = torch.empty((num_rows, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    result = None if grad is None else torch.empty_like(gate_up)
    launch(
        _gate_times,
        (num_rows, triton.cdiv(both // 2, BLOCK)),
        [grad, gate_up, result, y],
        reads=[gate_up] if grad is None else [grad, gate_up],
        writes=[y] if grad is None else [result, y],
        HAS_GRAD=grad is not None,
        IS_GELU=is_gelu,
        WIDTH=both // 2,
        BLOCK=BLOCK,
        WIDE=WIDE[wide_dtype(gate_up.dtype)],
        num_warps=warps_for(BLOCK),
    )
    return result, y


def gelu(launch, x, *, approximate):
    return _gelu_launch(launch, None, x, approximate)[1]


def gelu_grads(launch, grad, x, _kept, *, approximate):
    return _gelu_launch(launch, grad.contiguous(), x, approximate)


def _gelu_launch(launch, grad, x, approximate):
    """The gradient of x, if there is one of the result, and the result."""
    x, y = x.contiguous(), torch.empty_like(x)
    result = None if grad is None else torch.empty_like(x)
    launch(
        _gelu,
        (triton.cdiv(x.numel(), BLOCK),),
        [grad, x, result, y, x.numel()],
        reads=[x] if grad is None else [grad, x],
        writes=[y] if grad is None else [result, y],
        HAS_GRAD=grad is not None,
        IS_EXACT=approximate == "none",
        BLOCK=BLOCK,
        WIDE=WIDE[wide_dtype(x.dtype)],
        num_warps=warps_for(BLOCK),
    )
    return result, y


@triton.jit
def _gelu(
    grad,
    x,
    result,
    y,
    num_elements,
    HAS_GRAD: tl.constexpr,
    IS_EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """y = x P(x): P is the normal distribution, or sigmoid(2 u) = (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x +
    0.044715 x^3)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_elements
    value = tl.load(x + at, mask=mask, other=0.0).to(WIDE)
    if IS_EXACT:
        p = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        p = sigmoid(value * (1.5957691216057308 + 0.07135481627260025 * value * value))
    tl.store(y + at, (value * p).to(y.dtype.element_ty), mask=mask)
    if HAS_GRAD:
        if IS_EXACT:
            slope = 0.3989422804014327 * tl.exp(-0.5 * value * value)
        else:
            slope = p * (1.0 - p) * (1.5957691216057308 + 0.21406444881780076 * value * value)
        g = tl.load(grad + at, mask=mask, other=0.0).to(WIDE)
        tl.store(result + at, (g * (p + value * slope)).to(result.dtype.element_ty), mask=mask)


@triton.jit
def _gate_times(
    grad,
    gate_up,
    result,
    y,
    HAS_GRAD: tl.constexpr,
    IS_GELU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """y = a up with a = gate p, p = sigmoid(gate), or GELU's (see `_gelu`); d gate = g up a' and d up = g a."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = row * 2 * WIDTH + column
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(WIDE)
    up = tl.load(gate_up + at + WIDTH, mask=mask, other=0.0).to(WIDE)
    p = sigmoid(gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)) if IS_GELU else sigmoid(gate)
    activated = gate * p
    tl.store(y + row * WIDTH + column, (activated * up).to(y.dtype.element_ty), mask=mask)
    if HAS_GRAD:
        slope = p + activated * (1.0 - p)
        if IS_GELU:
            slope = p + activated * (1.0 - p) * (1.5957691216057308 + 0.21406444881780076 * gate * gate)
        g = tl.load(grad + row * WIDTH + column, mask=mask, other=0.0).to(WIDE)
        tl.store(result + at, (g * up * slope).to(result.dtype.element_ty), mask=mask)
        tl.store(result + at + WIDTH, (g * activated).to(result.dtype.element_ty), mask=mask)
