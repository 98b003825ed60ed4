"""A parameter's gradient sink: given once, it adds up, defers, and reports each gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel3d.layers.gradient_sink import GradientSink, WeightGradStore, run_deferred
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.parallel.sharding import ParamSharding


def make_weight() -> ShardedParameter:
    return ShardedParameter(ParamSharding(name="w", shape=(3, 2)), tp_size=1, dtype=torch.bfloat16)


def gradients() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(5, 3, generator=numbers), torch.randn(5, 2, generator=numbers)


def test_a_deferred_product_is_the_same_and_is_reported_when_it_is_added() -> None:
    (grad, x), store, added = gradients(), WeightGradStore(), []
    sinks = [GradientSink(torch.zeros(3, 2), weight_grads=store, on_added=lambda: added.append(1)) for _ in range(2)]
    sinks[0].add_product(grad, x)
    with store.deferred() as tasks:
        sinks[1].add_product(grad, x)
        sinks[1].add(torch.ones(3, 2))  # a bias' or a norm's gradient is not deferred
    assert len(added) == 2 and torch.equal(sinks[1].buffer, torch.ones(3, 2))
    run_deferred(tasks)
    assert len(added) == 3 and torch.allclose(sinks[1].buffer, sinks[0].buffer + 1.0)
    assert torch.allclose(sinks[0].buffer, grad.t() @ x)


def test_a_sink_is_given_once() -> None:
    weight = make_weight()
    weight.attach(GradientSink.with_own_buffer(weight))
    with pytest.raises(AssertionError, match="w already has a sink"):
        weight.attach(GradientSink.with_own_buffer(weight))


def test_outside_of_a_run_a_parameter_makes_its_own_wide_buffer() -> None:
    weight = make_weight()
    assert weight.main_grad is None
    weight.sink.add(torch.full((3, 2), 0.1))
    assert weight.main_grad is not None and weight.main_grad.dtype is torch.float32
    assert torch.equal(weight.main_grad, torch.full((3, 2), 0.1))


def test_the_first_gradient_of_an_iteration_overwrites() -> None:
    (grad, x), sink = gradients(), GradientSink(torch.full((3, 2), float("nan")))
    sink.clear()
    sink.add_product(grad, x)
    sink.add_product(grad, x)
    assert torch.allclose(sink.buffer, 2 * (grad.t() @ x))
    sink.clear()
    sink.add(torch.ones(3, 2))
    sink.add(torch.ones(3, 2))
    assert torch.equal(sink.buffer, torch.full((3, 2), 2.0))


def test_a_buffer_without_a_gradient_is_zero() -> None:
    sink = GradientSink(torch.full((3, 2), float("nan")))
    sink.clear()
    assert torch.equal(sink.buffer, torch.zeros(3, 2))
