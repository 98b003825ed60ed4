"""The context in which a layer is built: where its parameters are, and in which formats it computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from parallel3d.backends import Backend
from parallel3d.kernels.layer_kernels import TORCH_KERNELS, LayerKernels
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import Policy


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """The tensor-parallel region, the precision policy and the device of one replica's part of one stage."""

    tp: TensorParallel
    policy: Policy
    device: torch.device | str = "cpu"
    kernels: LayerKernels = TORCH_KERNELS
    """Compute everything but products and attention."""
    norm_backend: Backend = "torch"
    gemm: Gemm = field(default_factory=Gemm)
    """Computes the products of linear layers."""

    def parameter(self, sharding: ParamSharding) -> ShardedParameter:
        """This rank's share of a parameter, not yet initialised."""
        return ShardedParameter(
            sharding, tp_size=self.tp.group.size, dtype=self.policy.compute, device=self.device, gemm=self.gemm
        )
