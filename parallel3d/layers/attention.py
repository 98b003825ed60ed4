"""Causal self-attention over fused QKV: column-parallel projection, whole heads on each rank, row-parallel output.

The masked half is not computed and no mask tensor exists: torch's SDPA with is_causal, or on CPUs products over blocks
of queries where a run has measured that they are faster (layers/block_attention.py). With fewer key/value heads than
query heads (GQA, Ainslie et al. 2023) each rank holds whole groups; with fewer key/value heads than ranks, a copy of
the one head that its query heads share (HLAT-70B: 8 key-value heads on 32 ranks).

A document mask hides the tokens of other documents, as if each document were a sequence. On CPUs there is one SDPA for
each document; on CUDA in 16-bit formats torch's varlen_attn computes all of them at once.

A sliding window of w keys (Jiang et al. 2023, section 2; Beltagy et al. 2020) takes products over blocks of queries on
CPUs, whose masks have the size of a block, if w is at least `MIN_BLOCK_WINDOW`. Elsewhere it divides the sequence into
blocks of w queries. A block needs the keys of its own block and of the one before. All blocks, heads, sequences and
layers share one mask of 2 w^2 numbers in the queries' format, whatever the sequence's length::

    window 2, keys      0 1 2 3 4 5
    query block 0   0   x               is_causal, no mask
                    1   x x
    query block 1   2     x x           keys of blocks 0 and 1
                    3       x x

A text that is written token by token has its keys and values in a cache (layers/kv_cache.py).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from parallel3d.accelerator import is_accelerator
from parallel3d.kernels.layer_kernels import TORCH_KERNELS, AttentionKernels
from parallel3d.kernels.torch_attention import ScoreForm
from parallel3d.kernels.torch_rotary import HeadLayout, split_heads
from parallel3d.layers.block_attention import RunFn, attend_in_blocks, attend_with_form, call
from parallel3d.layers.gemm import AttentionForm
from parallel3d.layers.kv_cache import CachedTokens
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.placement import LayerContext
from parallel3d.layers.rotary import RotaryTable, split_and_rotate
from parallel3d.parallel.sharding import FusedBlock
from parallel3d.parallel.staged_group import to_device

MIN_BLOCK_WINDOW = 256
"""Keys from which a window on a CPU takes blocks: a smaller one's mask takes no more than a block's scores, and in
fp32 it may be faster (docs/experiments.md)."""


class CausalSelfAttention(nn.Module):
    """(tokens_local, hidden) -> (tokens_local, hidden); tokens are those of the micro-batch, sequence after sequence.

    `head_size` None: hidden_size divided by the heads. `table` None: no rotary positions. `window` is the number of
    keys that a query sees, its own included; None: all before it. `qk_norm`, from layers/qk_norm.py, gives the
    projection's result with queries and keys normed. Scores are divided by the root of `score_divisor`; None: of the
    head size. `score_cap` c makes c tanh(x / c) of them.
    """

    def __init__(
        self,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int | None = None,
        table: RotaryTable | None,
        init_std: float,
        output_init_std: float,
        qkv_bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        qk_norm: nn.Module | None = None,
        score_divisor: float | None = None,
        score_cap: float | None = None,
        context: LayerContext,
    ):
        super().__init__()
        self.table = table
        self.window, self.score_cap = window, score_cap
        self.form, self.kernels = context.gemm.attention, context.kernels.attention
        head_size = head_size or hidden_size // num_heads
        query_size, kv_size = num_heads * head_size, num_kv_heads * head_size
        self.heads = HeadLayout.of_rank(context.tp.group.size, num_heads, num_kv_heads, head_size)
        self.rotary_kernels = context.kernels.rotary
        fused_blocks = (
            FusedBlock(name="q", size=query_size),
            FusedBlock(name="k", size=kv_size, max_parts=num_kv_heads),
            FusedBlock(name="v", size=kv_size, max_parts=num_kv_heads),
        )
        self.qkv = ColumnParallelLinear(
            f"{name}.qkv", hidden_size, fused_blocks, init_std=init_std, bias=qkv_bias, context=context
        )
        self.qk_norm = qk_norm
        self.query_factor = (head_size / (score_divisor or head_size)) ** 0.5
        self.output = RowParallelLinear(
            f"{name}.output",
            query_size,
            hidden_size,
            init_std=output_init_std,
            bias=output_bias,
            context=context,
        )

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        qkv, recompute_context = self.qkv(x, micro_batch), self.qkv.tp.recompute_context
        normed = qkv if self.qk_norm is None else self.qk_norm(qkv)
        cached = micro_batch if isinstance(micro_batch, CachedTokens) else None
        by_sequence = normed.view(micro_batch.batch_size if cached is None else 1, -1, qkv.shape[-1])
        if self.table is None:
            q, k, v = split_heads(by_sequence, self.heads)
        else:
            table = self.table if cached is None else cached.rotary(self.table)
            may_overwrite = self.qk_norm is not None or not recompute_context.keeps_products
            q, k, v = split_and_rotate(
                by_sequence, table, self.heads, kernels=self.rotary_kernels, may_overwrite=may_overwrite
            )
        if self.query_factor != 1:
            q = q * self.query_factor
        if q.dtype is torch.float16 and not is_accelerator(q.device):  # torch's fp16 kernel takes 17 times as long
            q, k, v = q.float(), k.float(), v.float()
        with recompute_context.attention():
            mixed = self._mix(q, k, v, micro_batch) if cached is None else self._mix_cached(q, k, v, cached)
        return self.output(mixed.to(qkv.dtype).reshape(-1, self.heads.query_size), micro_batch)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, micro_batch: MicroBatch) -> Tensor:
        documents, run = micro_batch.documents, self.qkv.tp.recompute_context.run
        if documents is None:
            return attend(q, k, v, self.window, self.score_cap, form=self.form, kernels=self.kernels, run=run)
        return attend_per_document(documents, q, k, v, self.window, self.score_cap, run=run)

    def _mix_cached(self, q: Tensor, k: Tensor, v: Tensor, cached: CachedTokens) -> Tensor:
        layer = self.qkv.weight.sharding.name
        if not cached.begins:
            return cached.attend(layer, q, k, v, self.window, self.score_cap)
        cached.cache.begin(layer, cached.row, k[0], v[0], self.window)
        return self._mix(q, k, v, cached)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    cap: float | None = None,
    *,
    form: AttentionForm = "sdpa",
    kernels: AttentionKernels = TORCH_KERNELS.attention,
    run: RunFn = call,
) -> Tensor:
    """Causal attention: q (batch, seq, query heads, size), k and v (.., key-value heads, size) -> as q.

    `form` and `kernels`, which blocks use, are for CPUs and attention without a window that hides something. With one,
    its size decides; with a cap it is always blocks. `run` has the results of blocks where a layer runs again.
    """
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    is_wide = window is not None and MIN_BLOCK_WINDOW <= window < q.shape[2]
    if cap is not None or (is_wide and q.device.type == "cpu"):
        return attend_with_form(q, k, v, ScoreForm(window=window, cap=cap), run=run).transpose(1, 2)
    if window is None or window >= q.shape[2]:
        mixed = attend_in_blocks(q, k, v, kernels=kernels, run=run) if form == "blocks" else _attention(q, k, v)
        return mixed.transpose(1, 2)
    if _has_varlen_kernel(q):
        batch, _, seq, _ = q.shape
        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
        return _attend_varlen((seq,) * batch, q, k, v, window).unflatten(0, (batch, seq))
    # splits once and concatenates once: the gradient of each slice would have the size of the whole tensor
    blocks = list(zip(*(each.split(window, dim=2) for each in (q, k, v))))
    parts = [_attention(*blocks[0])]
    mask = _band_mask(window, q.dtype, q.device)
    for (_, k_before, v_before), (q_block, k_block, v_block) in zip(blocks, blocks[1:]):
        keys, values = torch.cat([k_before, k_block], dim=2), torch.cat([v_before, v_block], dim=2)
        parts.append(_attention(q_block, keys, values, mask=mask[: q_block.shape[2], : keys.shape[2]]))
    return torch.cat(parts, dim=2).transpose(1, 2)


@lru_cache(maxsize=2)
def _band_mask(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(window, 2 window) of 0 and -inf, which is added to scores: query i sees keys i + 1 to i + window.

    Not of booleans, of which SDPA would make, and keep for the backward pass, such numbers in every call.
    """
    with torch.inference_mode(False):  # else a backward pass could not use what an evaluation has made
        hidden = torch.full((window, 2 * window), float("-inf"), dtype=dtype, device=device)
        return hidden.tril(0) + hidden.triu(window + 1)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """SDPA of q, k and v (batch, heads, seq, size); without a mask (queries, keys) it is causal."""
    if is_accelerator(q.device) and q.dtype.itemsize > 2 and k.shape[1] != q.shape[1]:
        # no fused kernel groups the heads of wide formats
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] != q.shape[1]
    )


def attend_per_document(
    documents: tuple[int, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    cap: float | None = None,
    *,
    run: RunFn = call,
) -> Tensor:
    """`attend` for each document; their lengths add up to batch * seq: -> (1, batch * seq, query heads, size).

    Splits once and concatenates once, as the window does.
    """
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    if cap is None and _has_varlen_kernel(q):
        return _attend_varlen(documents, q, k, v, window).unsqueeze(0)
    queries, keys, values = (each.unsqueeze(0).split(documents, dim=1) for each in (q, k, v))
    return torch.cat([attend(*part, window, cap, run=run) for part in zip(queries, keys, values)], dim=1)


def _has_varlen_kernel(q: Tensor) -> bool:
    return is_accelerator(q.device) and q.dtype.itemsize == 2


@lru_cache(maxsize=4)
def _document_starts(documents: tuple[int, ...], device: torch.device) -> Tensor:
    """(documents + 1,) int32: all layers of a micro-batch, forward and recomputed, share one copy to the device."""
    return to_device(torch.tensor([0, *accumulate(documents)], dtype=torch.int32), device)


def _attend_varlen(documents: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of q, k and v (tokens, heads, size) by torch's kernel for sequences of many lengths. Not run yet.

    Key-value heads are repeated: torch 2.11 does not support grouped ones here.
    """
    from torch.nn.attention.varlen import varlen_attn  # on CPUs it has no kernel

    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) if group > 1 else each for each in (k, v))
    begins = _document_starts(documents, q.device)
    longest = max(documents)
    keys_before = -1 if window is None else window - 1
    mixed = varlen_attn(q, k, v, begins, begins, longest, longest, window_size=(keys_before, 0))
    assert isinstance(mixed, Tensor)  # a tuple only with return_aux
    return mixed
