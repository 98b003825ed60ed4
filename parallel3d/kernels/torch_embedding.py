"""The gradient of an embedding as torch operators: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.accelerator import is_accelerator


def add_rows(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
    """buffer[index[i]] += rows[i] where index[i] is a row of buffer: buffer (vocab_local, hidden), index (tokens,),
    rows (tokens, hidden).

    On a device the rows of a token are sorted and added up in fp32, and reach the buffer in one addition: the same bits
    each time, where index_add_ adds atomically, and none lost, where index_put_ into bf16 rounds after each row, so
    that the gradient of a frequent token would stop growing after some 256 equal ones.
    """
    elsewhere = (index < 0) | (index >= buffer.shape[0])
    local = index.masked_fill(elsewhere, 0)
    if not is_accelerator(buffer.device):
        buffer.index_add_(0, local, rows.to(buffer.dtype).masked_fill(elsewhere.unsqueeze(1), 0))
        return
    wide = torch.promote_types(torch.float32, rows.dtype)
    here = rows.to(wide).masked_fill(elsewhere.unsqueeze(1), 0)
    buffer.add_(torch.ops.aten.embedding_dense_backward(here, local, buffer.shape[0], -1, False))
