"""Ranges, tables and trained ranks on which forms of the update are compared."""

import torch

from parallel3d.inprocess.world import run_threads
from parallel3d.kernels.update_table import Piece, UpdateTable
from parallel3d.optim.update_rules import UPDATE_RULES
from parallel3d.optim.update_rules.update_rule import EXP_AVG_SQ, UpdateStep
from parallel3d.random_keys import bits, key_of
from tests.support.optimizer_ranks import NUM_STEPS, Rank, update_step

STEP = UpdateStep(number=3, learning_rate=1e-2, peak_learning_rate=1e-2, grad_scale=0.3)
KEY = key_of("update", 1, 2, "w")
INFINITY, NAN = float("inf"), float("nan")
EDGES = [0.0, -0.0, 1.0, -1.0, INFINITY, -INFINITY, NAN, 3.38e38, -3.38e38, 1e-38, 1e-40, -1e-45, 2.0**-126, 255.5]
NARROW, WIDE = torch.bfloat16, torch.float32


def variance_of(rule):
    states = UPDATE_RULES[rule].states
    return states.index(EXP_AVG_SQ) if EXP_AVG_SQ in states else None


def range_of(rule, num_elements, dtype, grad_dtype=None, seed=4):
    """Weights, states and gradients: all pairs of edge values in weights and gradients, then numbers of many sizes."""
    numbers = torch.Generator().manual_seed(seed)

    def draw():
        magnitude = torch.rand(num_elements, generator=numbers).mul(60).sub(40).exp2()
        return torch.randn(num_elements, generator=numbers) * magnitude

    weights, grads, states = draw(), draw(), torch.stack([draw() for _ in UPDATE_RULES[rule].states])
    states[-1].abs_()
    edges = torch.tensor(EDGES)[:num_elements]
    for place, values in enumerate([edges.repeat_interleave(len(edges)), edges.repeat(len(edges))]):
        count = min(len(values), num_elements)
        (weights, grads)[place][:count] = values[:count]
        states[-1, count // 2 : count] = values[: count - count // 2].abs()
    return weights.to(dtype), states.to(dtype), grads.to(grad_dtype or dtype)


def noise(span):
    return bits(KEY, torch.arange(span.start, span.stop))


def assert_same_bits(found, expected):
    """Equal bits, but for the payload of a NaN that was not rounded stochastically."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    pattern = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    differing = (found.view(pattern) != expected.view(pattern)) & ~found.isnan()
    assert not differing.any(), differing.nonzero()[:5].tolist()


def whole(num_elements, block=1 << 14):
    piece = Piece(start=0, stop=num_elements, origin=0, width=num_elements, stride=num_elements, shift=0, name="w")
    return UpdateTable.build([piece], [KEY], block)


def trained(kernels, **settings):
    """For each rank, its weights, its states and the norms before each step."""

    def body(number, world):
        rank, norms = Rank(number, world, kernels=kernels, **settings), []
        for step in range(NUM_STEPS):
            rank.reduce(step)
            norms.append((rank.squared_norm(), rank.state_norms()))
            rank.optimizer.update(step + 1, None if step == 1 else update_step(step))
        rank.optimizer.finish_gather()
        return rank.weights(), rank.state(), norms

    return run_threads(settings["tp_size"] * settings["dp_size"], body)
