"""A parameter that knows its global identity and where its gradients are added up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel3d.layers.gemm import Gemm
from parallel3d.layers.gradient_sink import GradientSink
from parallel3d.parallel.sharding import ParamSharding


class ShardedParameter(nn.Parameter):
    """This rank's share (shape: `sharding.local_shape(tp_size)`) of a global parameter."""

    sharding: ParamSharding
    gemm: Gemm
    """Computes the products with this parameter."""
    first_value: Tensor | None
    """This rank's share of the value with which a user's module was built, until the run begins; else None."""
    _sink: GradientSink | None

    def __new__(
        cls,
        sharding: ParamSharding,
        *,
        tp_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        gemm: Gemm | None = None,
    ) -> ShardedParameter:
        data = torch.empty(sharding.local_shape(tp_size), dtype=dtype, device=device)
        self = nn.Parameter.__new__(cls, data, True)
        self.sharding = sharding
        self.gemm = gemm or Gemm()
        self.first_value = None
        self._sink = None
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def attach(self, sink: GradientSink) -> None:
        """Gives the parameter its sink, once, before its first gradient."""
        assert self._sink is None, f"{self.sharding.name} already has a sink for its gradients"
        self._sink = sink

    @property
    def sink(self) -> GradientSink:
        """Where layers add this parameter's gradients. Outside of a run, where no bucket gave one, it is made on first
        use."""
        if self._sink is None:
            self._sink = GradientSink.with_own_buffer(self, gemm=self.gemm)
        return self._sink

    @property
    def main_grad(self) -> Tensor | None:
        """The sum of the gradients that were added; None before the first one of a parameter that is in no bucket."""
        return None if self._sink is None else self._sink.buffer


def parameters_of(module: nn.Module) -> list[ShardedParameter]:
    """All parameters of a module in definition order; every one must be sharded explicitly."""
    parameters = list(module.parameters())
    assert all(isinstance(parameter, ShardedParameter) for parameter in parameters)
    return parameters  # type: ignore[return-value]
