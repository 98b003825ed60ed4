"""Where a layer's parameters live and in which formats it computes: what every layer is told at construction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallel3d.comm.tensor_parallel import TensorParallel
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.precision.policy import Policy
from parallel3d.sharding import ParamSharding


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The tensor-parallel region, the precision policy and the device of one replica's part of one stage."""

    tp: TensorParallel
    policy: Policy
    device: torch.device | str = "cpu"

    def parameter(self, sharding: ParamSharding) -> ShardedParameter:
        """This rank's share of a parameter, not yet initialised."""
        return ShardedParameter(sharding, tp_size=self.tp.group.size, dtype=self.policy.compute, device=self.device)
