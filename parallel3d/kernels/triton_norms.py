"""RMSNorm and LayerNorm with the residual connection in front, as one kernel forward and two backward.

A forward program has one row. A backward program has `BLOCK_ROWS` rows, one after another, and adds up their part of
the parameters' gradients; the second kernel adds the parts in order. Rows are numbered from the start of the rank's
tokens, so that the sums are functions of the number of tokens alone.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel3d.kernels.torch_norms import Normed, NormGrads
from parallel3d.kernels.triton_math import WIDE, row_block, warps_for, wide_dtype
from parallel3d.kernels.triton_row_sums import add_parts

BLOCK_ROWS = 32
"""Rows of a partial sum. More would leave multiprocessors idle at 4,096 tokens; these parts are 3 % of the bytes that
move at 4,096 features."""


def rms_norm(launch, x, delta, parameters, eps, wide):
    return _forward(launch, x, delta, parameters, eps, wide, has_mean=False)


def layer_norm(launch, x, delta, parameters, eps, wide):
    return _forward(launch, x, delta, parameters, eps, wide, has_mean=True)


def rms_norm_grads(launch, grad, total, statistics, parameters, residual_grad):
    return _backward(launch, grad, total, statistics, parameters, residual_grad, has_mean=False)


def layer_norm_grads(launch, grad, total, statistics, parameters, residual_grad):
    return _backward(launch, grad, total, statistics, parameters, residual_grad, has_mean=True)


def _forward(launch, x, delta, parameters, eps, wide, *, has_mean):
    x, (num_rows, width) = x.contiguous(), x.shape
    wide = wide_dtype(wide)
    delta = None if delta is None else delta.contiguous()
    total = x if delta is None else torch.empty_like(x)
    y = torch.empty_like(x)
    statistics = tuple(torch.empty((num_rows, 1), dtype=wide, device=x.device) for _ in range(1 + has_mean))
    block = row_block(width)
    launch(
        _norm,
        (num_rows,),
        [x, delta, parameters[0], parameters[-1], total, y, statistics[0], statistics[-1]],
        reads=[x, *parameters] if delta is None else [x, delta, *parameters],
        writes=[y, *statistics] if delta is None else [total, y, *statistics],
        EPS=eps,
        WIDTH=width,
        HAS_DELTA=delta is not None,
        HAS_MEAN=has_mean,
        BLOCK=block,
        WIDE=WIDE[wide],
        num_warps=warps_for(block),
    )
    return Normed(total, y, statistics)


def _backward(launch, grad, total, statistics, parameters, residual_grad, *, has_mean):
    grad, total, (num_rows, width) = grad.contiguous(), total.contiguous(), total.shape
    residual_grad = None if residual_grad is None else residual_grad.contiguous()
    wide, num_blocks = statistics[0].dtype, triton.cdiv(num_rows, BLOCK_ROWS)
    result = torch.empty_like(total)
    parts = torch.empty((num_blocks, len(parameters), width), dtype=wide, device=total.device)
    block = row_block(width)
    launch(
        _norm_grads,
        (num_blocks,),
        [grad, total, statistics[0], statistics[-1], parameters[0], residual_grad, result, parts, num_rows],
        reads=[grad, total, *statistics, parameters[0], *([] if residual_grad is None else [residual_grad])],
        writes=[result, parts],
        WIDTH=width,
        HAS_RESIDUAL=residual_grad is not None,
        HAS_MEAN=has_mean,
        BLOCK=block,
        BLOCK_ROWS=BLOCK_ROWS,
        WIDE=WIDE[wide],
        num_warps=warps_for(block),
    )
    return NormGrads(result, tuple(add_parts(launch, parts).unbind(0)))


@triton.jit
def _norm(
    x,
    delta,
    weight,
    bias,
    total,
    y,
    mean,
    scale,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One row: t = x + delta, rounded to x's format; y = norm(t)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at, mask = row * WIDTH + column, column < WIDTH
    t = tl.load(x + at, mask=mask, other=0.0)
    if HAS_DELTA:
        t = (t.to(WIDE) + tl.load(delta + at, mask=mask, other=0.0).to(WIDE)).to(t.dtype)
        tl.store(total + at, t, mask=mask)
    value = t.to(WIDE)
    if HAS_MEAN:
        center = tl.sum(value, 0) / WIDTH
        value = tl.where(mask, value - center, 0.0)
        tl.store(mean + row, center)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + EPS)
    tl.store(scale + row, inverse)
    result = value * inverse * tl.load(weight + column, mask=mask, other=0.0).to(WIDE)
    if HAS_MEAN:
        result += tl.load(bias + column, mask=mask, other=0.0).to(WIDE)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_grads(
    grad,
    total,
    mean,
    scale,
    weight,
    residual_grad,
    result,
    parts,
    num_rows,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """BLOCK_ROWS rows: their input gradients, and their part of the parameters' gradients."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    w = tl.load(weight + column, mask=in_row, other=0.0).to(WIDE)
    weight_grad = tl.zeros([BLOCK], dtype=WIDE)
    bias_grad = tl.zeros([BLOCK], dtype=WIDE)
    for number in range(BLOCK_ROWS):
        row = block * BLOCK_ROWS + number
        exists = row < num_rows
        mask = in_row & exists
        at = row * WIDTH + column
        g = tl.load(grad + at, mask=mask, other=0.0).to(WIDE)
        normed = tl.load(total + at, mask=mask, other=0.0).to(WIDE)
        inverse = tl.load(scale + row, mask=exists, other=0.0)
        if HAS_MEAN:
            normed = tl.where(mask, normed - tl.load(mean + row, mask=exists, other=0.0), 0.0)
            bias_grad += g
        normed *= inverse
        weight_grad += g * normed
        g *= w
        d = g - normed * (tl.sum(g * normed, 0) / WIDTH)
        if HAS_MEAN:
            d -= tl.sum(g, 0) / WIDTH
        d *= inverse
        if HAS_RESIDUAL:
            d += tl.load(residual_grad + at, mask=mask, other=0.0).to(WIDE)
        tl.store(result + at, d.to(result.dtype.element_ty), mask=mask)
    if HAS_MEAN:
        tl.store(parts + 2 * block * WIDTH + column, weight_grad, mask=in_row)
        tl.store(parts + (2 * block + 1) * WIDTH + column, bias_grad, mask=in_row)
    else:
        tl.store(parts + block * WIDTH + column, weight_grad, mask=in_row)
