"""The global index of the elements that a rank holds, by which all noise on parameters is keyed."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from parallel3d.parallel.sharding import ParamSharding, TpShard

_PADDING = -(1 << 62)


def global_index(
    sharding: ParamSharding,
    span: range,
    *,
    tp: TpShard,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The indices in the flattened whole parameter of elements `span` of the flattened local share: (elements,) int64.

    Negative for padding. Copies on several ranks have the same index::

        dim 0 of 4 x 3, rank 1 of 2    local 0 1 2 3 4 5  ->  6 7 8 9 10 11
        dim 1 of 2 x 4, rank 1 of 2    local 0 1 | 2 3    ->  2 3 | 6 7
    """
    dim, local = sharding.dim or 0, sharding.local_shape(tp.size)
    inner = prod(sharding.shape[dim + 1 :])
    width, stride = local[dim] * inner, sharding.shape[dim] * inner  # of one index of the dimensions before dim
    rows = range(span.start // width, -(-span.stop // width))
    columns = range(width) if len(rows) > 1 else range(span.start - rows.start * width, span.stop - rows.start * width)
    row = torch.full((len(columns),), _PADDING, dtype=torch.int64, device=device)
    for run in sharding.runs(tp):
        start = max(run.local_start * inner, columns.start)
        stop = min((run.local_start + run.length) * inner, columns.stop)
        if start < stop:
            shift = (run.global_start - run.local_start) * inner
            torch.arange(
                start + shift, stop + shift, device=device, out=row[start - columns.start : stop - columns.start]
            )
    if len(rows) == 1:
        return row.add_(rows.start * stride)
    index = torch.arange(rows.start, rows.stop, device=device).mul_(stride).unsqueeze(1) + row
    begin = span.start - rows.start * width
    return index.view(-1)[begin : begin + len(span)]
