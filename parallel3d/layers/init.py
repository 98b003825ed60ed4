"""Initial weights as a function of (seed, parameter name, global element index): the same on every layout.

Output projections may be scaled down with depth, in both of HLAT's forms: 1/sqrt(2 l) with the 1-based layer index l
(its paper, section III-B) or 1/sqrt(2 L) with the number of layers (its code).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from parallel3d.random_keys import key_of, normal
from parallel3d.sharding import ParamSharding

DepthScaling = Literal["none", "layer_index", "num_layers"]
_BLOCK_ELEMENTS = 1 << 20


def depth_scale(scaling: DepthScaling, *, layer: int, num_layers: int) -> float:
    """The factor on the std of the output projections of the 0-based `layer`."""
    return {"none": 1.0, "layer_index": (2 * (layer + 1)) ** -0.5, "num_layers": (2 * num_layers) ** -0.5}[scaling]


@torch.no_grad()
def initial_value(sharding: ParamSharding, *, seed: int, tp_rank: int, tp_size: int) -> Tensor:
    """This rank's share of the initial parameter, float32: normal numbers, ones for a norm, zeros for biases and
    padding."""
    if sharding.init_std is None:
        return torch.ones(sharding.local_shape(tp_size))
    value = torch.zeros(sharding.local_shape(tp_size))
    if sharding.init_std == 0:
        return value
    key = key_of("init", seed, sharding.name)
    dim = sharding.dim or 0
    for run in sharding.runs(tp_rank, tp_size):
        block = value.narrow(dim, run.local_start, run.length)
        _fill(block, key_row=run.global_start, sharding=sharding, dim=dim, key=key)
    return value.mul_(sharding.init_std)


def _fill(block: Tensor, *, key_row: int, sharding: ParamSharding, dim: int, key: object) -> None:
    """Fills a rectangle of the parameter whose first index along `dim` is `key_row`, some rows at a time."""
    num_columns = sharding.shape[-1] if len(sharding.shape) > 1 else 1
    row_start, column_start = (key_row, 0) if dim == 0 else (0, key_row)
    flat = block if block.ndim > 1 else block.unsqueeze(1)
    columns = torch.arange(flat.shape[1]) + column_start
    step = max(1, _BLOCK_ELEMENTS // flat.shape[1])
    for start in range(0, flat.shape[0], step):
        part = flat[start : start + step]
        rows = torch.arange(start, start + part.shape[0]) + row_start
        part.copy_(normal(key, rows[:, None] * num_columns + columns))  # type: ignore[arg-type]
