"""Where a layer's parameters live and in which formats it computes: what every layer is told at construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec, TypeVar

import torch

from parallel3d.backends import Backend
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

    def kernel(self, function: Callable[P, R]) -> Callable[P, R]:
        """A function of tensors without side effects, compiled if that is asked for."""
        return _compiled(function) if self.compiles else function

    def parameter(self, sharding: ParamSharding) -> ShardedParameter:
        """This rank's share of a parameter, not yet initialised."""
        return ShardedParameter(sharding, tp_size=self.tp.group.size, dtype=self.policy.compute, device=self.device)


@cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    """One for all layers, made at the first call; a second length of sequences makes one for all lengths."""
    return torch.compile(function, fullgraph=True)
