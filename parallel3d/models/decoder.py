"""A decoder of any family over a range of layers: embedding, layers, final norm, head.

A stage with the first layer has the embedding, one with the last layer has the final norm and the head. One tensor
(tokens_local, hidden) travels between stages. The family's row decides the norms, MLPs and positions (blocks.py).

A tied head is the embedding's matrix. The first and the last stage each hold it, as parameters of one name; a stage
that is both holds one parameter, which two modules use.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from parallel3d.config.derived import attention_window, has_qkv_bias, head_size, num_key_value_heads
from parallel3d.layers.attention import CausalSelfAttention
from parallel3d.layers.cross_entropy import LinearCrossEntropy
from parallel3d.layers.dropout import dropout
from parallel3d.layers.embedding import VocabParallelEmbedding
from parallel3d.layers.init import depth_scale
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.models.blocks import BlockBuilder
from parallel3d.recompute import Recompute, run_layer


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `index` is 0-based.

    Families may norm what attention and MLP give, too, or instead: x + norm(attention(x)).
    """

    def __init__(self, build: BlockBuilder, index: int):
        super().__init__()
        config, context, name = build.config, build.context, f"layers.{index}"
        scale = depth_scale(config.initializer_depth_scaling, layer=index, num_layers=config.num_hidden_layers)
        output_init_std = config.initializer_range * scale
        self.index, self.tp, self.drop = index, context.tp, config.hidden_dropout
        self.dropout_kernels = context.kernels.dropout
        self.attention_norm = build.input_norm(f"{name}.attention_norm")
        self.attention = CausalSelfAttention(
            f"{name}.attention",
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=num_key_value_heads(config),
            head_size=head_size(config),
            table=build.rotary_table(index),
            init_std=config.initializer_range,
            output_init_std=output_init_std,
            qkv_bias=has_qkv_bias(config),
            output_bias=build.family.output_bias,
            window=attention_window(config, index),
            score_divisor=build.value_of(build.family.score_field),
            score_cap=build.value_of(build.family.score_cap_field),
            qk_norm=build.qk_norm(f"{name}.attention"),
            context=context,
        )
        self.attention_output_norm = build.output_norm(f"{name}.attention_output_norm")
        self.mlp_norm = build.input_norm(f"{name}.mlp_norm")
        self.mlp = build.mlp(f"{name}.mlp", output_init_std)
        self.mlp_output_norm = build.output_norm(f"{name}.mlp_output_norm")

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        x, normed = (x, x) if self.attention_norm is None else self.attention_norm(x)
        delta = _norm(self.attention_output_norm, self.attention(normed, micro_batch))
        delta = self._dropout(delta, micro_batch, "attention")
        if self.mlp_norm is None:
            x = normed = x + delta
        else:
            x, normed = self.mlp_norm(x, delta)
        delta = _norm(self.mlp_output_norm, self.mlp(normed, micro_batch))
        return x + self._dropout(delta, micro_batch, "mlp")

    def _dropout(self, x: Tensor, micro_batch: MicroBatch, site: str) -> Tensor:
        return dropout(
            x,
            self.drop,
            micro_batch=micro_batch,
            layer=self.index,
            site=site,
            tp=self.tp,
            kernels=self.dropout_kernels,
        )


def _norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)[1]


class DecoderStage(nn.Module):
    """Layers `layers` of the model. Input: token ids (tokens,) on the first stage, else (tokens_local, hidden).

    Output: (tokens_local, hidden). On the last stage: the sum of the token losses (float64 scalar), which needs the
    targets (tokens,).
    """

    def __init__(self, build: BlockBuilder, layers: range, *, recompute: Recompute = "none"):
        super().__init__()
        config, context = build.config, build.context
        self.tp, self.drop, self.recompute = context.tp, config.hidden_dropout, recompute
        self.dropout_kernels, self.norms_outputs = context.kernels.dropout, build.family.norms_outputs
        sizes, std, tied = (config.vocab_size, config.hidden_size), config.initializer_range, config.tie_word_embeddings
        is_first, is_last = layers.start == 0, layers.stop == config.num_hidden_layers
        name, head_name = "embedding.weight", "embedding.weight" if tied else "head.weight"
        self.embedding = (
            VocabParallelEmbedding(name, *sizes, init_std=std, context=context, tied=tied) if is_first else None
        )
        self.positions = build.positions() if is_first else None
        self.embedding_factor = config.hidden_size**0.5 if build.family.scales_embedding else None
        self.layers = nn.ModuleList(DecoderLayer(build, index) for index in layers)
        self.final_norm = build.norm("final_norm") if is_last else None
        cap = build.value_of(build.family.logit_cap_field)
        head = partial(LinearCrossEntropy, head_name, *sizes, init_std=std, context=context, tied=tied, cap=cap)
        self.head = head() if is_last else None
        if tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, micro_batch: MicroBatch, targets: Tensor | None = None) -> Tensor:
        x = self._run_layers(x, micro_batch)
        if self.head is None or self.final_norm is None:
            return x
        assert targets is not None
        _, normed = self.final_norm(x)
        return self.head(normed, targets, micro_batch.loss_factor, masks_targets=micro_batch.masks_targets)

    @torch.no_grad()
    def logits(self, x: Tensor, micro_batch: MicroBatch, rows: slice = slice(None)) -> Tensor:
        """The logits (tokens, vocab) of forward's input, on every rank of the tensor-parallel group; last stage only.

        `rows`: of these tokens alone, where tokens are not sharded. The weights must be complete: finish an optimizer's
        gather first (`finish_gather`).
        """
        assert self.head is not None and self.final_norm is not None, "logits come from the last stage"
        _, normed = self.final_norm(self._run_layers(x, micro_batch))
        return self.head.logits(normed[rows])

    def _run_layers(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
            if self.embedding_factor is not None:
                x = x * torch.tensor(self.embedding_factor, dtype=x.dtype).item()  # rounded to x's format
            x = x if self.positions is None else self.positions(x, micro_batch)
            x = dropout(
                x,
                self.drop,
                micro_batch=micro_batch,
                layer=-1,
                site="embedding",
                tp=self.tp,
                kernels=self.dropout_kernels,
            )
        for layer in self.layers:
            x = run_layer(
                layer,
                x,
                micro_batch,
                recompute=self.recompute,
                recompute_context=self.tp.recompute_context,
                reads_last=self.norms_outputs,
            )
        return x
