"""Causal self-attention over fused QKV: column-parallel projection, whole heads on each rank, row-parallel output.

The masked half is not computed and no mask tensor exists: torch's SDPA with is_causal. With fewer key/value heads than
query heads (GQA, Ainslie et al. 2023) each rank holds whole groups; with fewer than ranks, a copy of the one head that
its query heads share (HLAT-70B: 8 key-value heads on 32 ranks).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.placement import Placement
from parallel3d.layers.rotary import HeadLayout, RotaryTable, rotated_heads, split_and_rotate, split_heads
from parallel3d.sharding import Chunk


class CausalSelfAttention(nn.Module):
    """(tokens_local, hidden) -> (tokens_local, hidden); tokens are the micro-batch's sequences laid end to end.

    `table` None: nothing is rotated.
    """

    def __init__(
        self,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        table: RotaryTable | None,
        init_std: float,
        output_init_std: float,
        qkv_bias: bool = False,
        output_bias: bool = False,
        on: Placement,
    ):
        super().__init__()
        self.table = table
        head_size = hidden_size // num_heads
        kv_size = num_kv_heads * head_size
        self.heads = HeadLayout(
            num_query_heads=num_heads // on.tp.group.size,
            num_kv_heads=max(1, num_kv_heads // on.tp.group.size),
            head_size=head_size,
        )
        self.rotate = on.kernel(rotated_heads) if on.compiles else split_and_rotate
        chunks = (
            Chunk(name="q", size=hidden_size),
            Chunk(name="k", size=kv_size, max_parts=num_kv_heads),
            Chunk(name="v", size=kv_size, max_parts=num_kv_heads),
        )
        self.qkv = ColumnParallelLinear(f"{name}.qkv", hidden_size, chunks, init_std=init_std, bias=qkv_bias, on=on)
        self.output = RowParallelLinear(
            f"{name}.output",
            hidden_size,
            hidden_size,
            init_std=output_init_std,
            bias=output_bias,
            on=on,
        )

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        qkv, batch_size = self.qkv(x, micro_batch), micro_batch.batch_size
        if self.table is None:
            q, k, v = split_heads(qkv.view(batch_size, -1, qkv.shape[-1]), self.heads)
        else:
            q, k, v = self.rotate(qkv, self.table, self.heads, batch_size)
        if q.dtype is torch.float16 and q.device.type == "cpu":  # torch's fp16 kernel takes 17 times as long
            q, k, v = q.float(), k.float(), v.float()
        with self.qkv.tp.products.attention():
            mixed = scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                enable_gqa=self.heads.num_kv_heads != self.heads.num_query_heads,
            )
        mixed = mixed.to(qkv.dtype).transpose(1, 2).reshape(-1, self.heads.query_size)
        return self.output(mixed, micro_batch)
