"""The context in which a layer is built: where its parameters are, and in which formats it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import ParamSpec, TypeVar

import torch

from parallel3d.backends import Backend
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """The tensor-parallel region, the precision policy and the device of one replica's part of one stage."""

    tp: TensorParallel
    policy: Policy
    device: torch.device | str = "cpu"
    compiles: bool = False
    """Whether chains of elementwise operations become one kernel each."""
    norm_backend: Backend = "torch"
    gemm: Gemm = field(default_factory=Gemm)
    """Computes the products of linear layers."""

    def kernel(self, function: Callable[P, R]) -> Callable[P, R]:
        """A function of tensors without side effects, compiled if `compiles`."""
        return _compiled(function) if self.compiles else function

    def parameter(self, sharding: ParamSharding) -> ShardedParameter:
        """This rank's share of a parameter, not yet initialised."""
        return ShardedParameter(
            sharding, tp_size=self.tp.group.size, dtype=self.policy.compute, device=self.device, gemm=self.gemm
        )


@cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    """One compiled function for all layers, made at the first call; a second length makes one for all lengths."""
    return torch.compile(function, fullgraph=True)
