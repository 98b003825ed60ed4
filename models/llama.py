"""Llama (Touvron et al. 2023), as a plain module over a range of layers: RMSNorm, rotary, GQA, SwiGLU, no biases.

A stage that holds the first layer has the embedding, one that holds the last has the final norm and the head. Between
the stages travels one tensor (tokens_local, hidden).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel3d.comm.tensor_parallel import TensorParallel
from parallel3d.config.derived import head_size, num_key_value_heads
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.layers.attention import CausalSelfAttention
from parallel3d.layers.cross_entropy import LinearCrossEntropy
from parallel3d.layers.dropout import dropout
from parallel3d.layers.embedding import VocabParallelEmbedding
from parallel3d.layers.init import depth_scale
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.placement import Placement
from parallel3d.layers.rotary import RotaryTable
from parallel3d.layers.swiglu import SwiGLU
from parallel3d.precision.policy import POLICIES


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    def __init__(self, config: ModelConfig, index: int, *, on: Placement):
        super().__init__()
        name, hidden_size, std = f"layers.{index}", config.hidden_size, config.initializer_range
        scale = depth_scale(config.initializer_depth_scaling, layer=index, num_layers=config.num_hidden_layers)
        self.index, self.tp, self.drop = index, on.tp, config.hidden_dropout
        self.attention_norm = RMSNorm(f"{name}.attention_norm.weight", hidden_size, eps=config.rms_norm_eps, on=on)
        self.attention = CausalSelfAttention(
            f"{name}.attention",
            hidden_size=hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=num_key_value_heads(config),
            init_std=std,
            output_init_std=std * scale,
            on=on,
        )
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm.weight", hidden_size, eps=config.rms_norm_eps, on=on)
        self.mlp = SwiGLU(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.intermediate_size,
            init_std=std,
            output_init_std=std * scale,
            on=on,
        )

    def forward(self, x: Tensor, table: RotaryTable, micro_batch: MicroBatch) -> Tensor:
        mixed = self.attention(self.attention_norm(x), table, micro_batch.batch_size)
        x = x + self._dropout(mixed, micro_batch, "attention")
        return x + self._dropout(self.mlp(self.mlp_norm(x)), micro_batch, "mlp")

    def _dropout(self, x: Tensor, micro_batch: MicroBatch, site: str) -> Tensor:
        return dropout(x, self.drop, micro_batch=micro_batch, layer=self.index, site=site, tp=self.tp)


class LlamaStage(nn.Module):
    """Layers `layers` of the model. Input: token ids (tokens,) on the first stage, else (tokens_local, hidden).

    Output: (tokens_local, hidden), or on the last stage the sum of the token losses (float64 scalar), for which it
    needs the targets (tokens,).
    """

    def __init__(self, config: ModelConfig, layers: range, *, num_positions: int, on: Placement):
        super().__init__()
        self.tp, self.drop = on.tp, config.hidden_dropout
        sizes, std = (config.vocab_size, config.hidden_size), config.initializer_range
        is_first, is_last = layers.start == 0, layers.stop == config.num_hidden_layers
        self.embedding = VocabParallelEmbedding("embedding.weight", *sizes, init_std=std, on=on) if is_first else None
        self.layers = nn.ModuleList(LlamaLayer(config, index, on=on) for index in layers)
        self.final_norm = (
            RMSNorm("final_norm.weight", config.hidden_size, eps=config.rms_norm_eps, on=on) if is_last else None
        )
        self.head = LinearCrossEntropy("head.weight", *sizes, init_std=std, on=on) if is_last else None
        self.table = RotaryTable.build(
            num_positions, head_size(config), config.rope_theta, on.policy.sensitive, str(on.device)
        )

    def forward(self, x: Tensor, micro_batch: MicroBatch, targets: Tensor | None = None) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
            x = dropout(x, self.drop, micro_batch=micro_batch, layer=-1, site="embedding", tp=self.tp)
        for layer in self.layers:
            x = layer(x, self.table, micro_batch)
        if self.head is None or self.final_norm is None:
            return x
        assert targets is not None
        return self.head(self.final_norm(x), targets)


def make_llama_stage(config: Config, layers: range, tp: TensorParallel, device: torch.device) -> LlamaStage:
    """The model's constructor as the trainer asks for it."""
    on = Placement(tp=tp, policy=POLICIES[config.precision.policy], device=device)
    return LlamaStage(config.model, layers, num_positions=config.batch.sequence_length, on=on)
