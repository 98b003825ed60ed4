"""Initial weights as a function of (seed, parameter name, global element index): the same on every layout.

Output projections may be scaled down with depth, in either of HLAT's forms: 1/sqrt(2 l) with the 1-based layer index l
(its paper, section III-B) or 1/sqrt(2 L) with the number of layers (its code).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from parallel3d.accelerator import blocks_of
from parallel3d.layers.global_index import global_index
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.parallel.sharding import ParamSharding, TpShard
from parallel3d.random_keys import key_of, normal


class InitMethod(Protocol):
    """Returns a rank's share of a parameter at the start of a run, in any floating-point format."""

    def __call__(self, sharding: ParamSharding, *, tp: TpShard) -> Tensor: ...


DepthScaling = Literal["none", "layer_index", "num_layers"]
_BLOCK = 1 << 20


def depth_scale(scaling: DepthScaling, *, layer: int, num_layers: int) -> float:
    """The factor on the std of the output projections of the 0-based `layer`."""
    return {"none": 1.0, "layer_index": (2 * (layer + 1)) ** -0.5, "num_layers": (2 * num_layers) ** -0.5}[scaling]


@torch.no_grad()
def initial_value(sharding: ParamSharding, *, seed: int, tp: TpShard, device: torch.device | str = "cpu") -> Tensor:
    """This rank's share of the initial parameter, float32: normal numbers, ones for a norm, zeros for biases and
    padding. The same bits on every device."""
    if sharding.init_std is None:
        return torch.ones(sharding.local_shape(tp.size), device=device)
    value = torch.zeros(sharding.local_shape(tp.size), device=device)
    if sharding.init_std == 0:
        return value
    key, flat = key_of("init", seed, sharding.name), value.view(-1)
    for span in blocks_of(flat, _BLOCK):
        index = global_index(sharding, span, tp=tp, device=device)
        flat[span.start : span.stop] = normal(key, index).masked_fill_(index < 0, 0.0)
    return value.mul_(sharding.init_std)


def awaited_value(sharding: ParamSharding, *, tp: TpShard) -> Tensor:
    """An `InitMethod` for a rank that gets its state from others: zeros, as its padding stays."""
    return torch.zeros(sharding.local_shape(tp.size))


def first_value(
    parameters: Mapping[str, ShardedParameter], seed: int, device: torch.device, sharding: ParamSharding, *, tp: TpShard
) -> Tensor:
    """This rank's share of a parameter as the run starts: as a user's module was built, or drawn from the seed."""
    own = parameters[sharding.name].first_value
    return initial_value(sharding, seed=seed, tp=tp, device=device) if own is None else own
