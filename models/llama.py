"""Llama (Touvron et al. 2023), as a plain module over a range of layers: RMSNorm, rotary, GQA, SwiGLU, no biases.

A stage that holds the first layer has the embedding, one that holds the last has the final norm and the head. Between
the stages travels one tensor (tokens_local, hidden).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel3d.comm.tensor_parallel import TensorParallel
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.layers.attention import CausalSelfAttention
from parallel3d.layers.cross_entropy import LinearCrossEntropy
from parallel3d.layers.dropout import dropout
from parallel3d.layers.embedding import VocabParallelEmbedding
from parallel3d.layers.init import depth_scale
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.rotary import RotaryTable
from parallel3d.layers.swiglu import SwiGLU
from parallel3d.precision.policy import POLICIES, Policy


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    def __init__(
        self, config: ModelConfig, index: int, *, tp: TensorParallel, policy: Policy, device: torch.device | str
    ):
        super().__init__()
        name = f"layers.{index}"
        std = config.initializer_range
        output_std = std * depth_scale(
            config.initializer_depth_scaling, layer=index, num_layers=config.num_hidden_layers
        )
        self.index, self.tp, self.drop = index, tp, config.hidden_dropout
        norm = {
            "eps": config.rms_norm_eps,
            "tp": tp,
            "sensitive": policy.sensitive,
            "dtype": policy.compute,
            "device": device,
        }
        dense = {"tp": tp, "init_std": std, "output_init_std": output_std, "dtype": policy.compute, "device": device}
        self.attention_norm = RMSNorm(f"{name}.attention_norm.weight", config.hidden_size, **norm)
        self.attention = CausalSelfAttention(
            f"{name}.attention",
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            **dense,
        )
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm.weight", config.hidden_size, **norm)
        self.mlp = SwiGLU(
            f"{name}.mlp", hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, **dense
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

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        *,
        num_positions: int,
        tp: TensorParallel,
        policy: Policy,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        self.tp, self.drop = tp, config.hidden_dropout
        shared = {"tp": tp, "dtype": policy.compute, "device": device}
        sizes = (config.vocab_size, config.hidden_size)
        self.embedding = (
            VocabParallelEmbedding("embedding.weight", *sizes, init_std=config.initializer_range, **shared)
            if layers.start == 0
            else None
        )
        self.layers = nn.ModuleList(LlamaLayer(config, i, tp=tp, policy=policy, device=device) for i in layers)
        is_last = layers.stop == config.num_hidden_layers
        self.final_norm = (
            RMSNorm(
                "final_norm.weight",
                config.hidden_size,
                eps=config.rms_norm_eps,
                sensitive=policy.sensitive,
                **shared,
            )
            if is_last
            else None
        )
        self.head = (
            LinearCrossEntropy(
                "head.weight", *sizes, init_std=config.initializer_range, sensitive=policy.sensitive, **shared
            )
            if is_last
            else None
        )
        head_size = config.hidden_size // config.num_attention_heads
        self.table = RotaryTable.build(num_positions, head_size, config.rope_theta, policy.sensitive, str(device))

    def forward(self, x: Tensor, micro_batch: MicroBatch, targets: Tensor | None = None) -> Tensor:
        if self.embedding is not None:
            x = dropout(self.embedding(x), self.drop, micro_batch=micro_batch, layer=-1, site="embedding", tp=self.tp)
        for layer in self.layers:
            x = layer(x, self.table, micro_batch)
        if self.head is None or self.final_norm is None:
            return x
        assert targets is not None
        return self.head(self.final_norm(x), targets)


def make_llama_stage(config: Config, layers: range, tp: TensorParallel, device: torch.device) -> LlamaStage:
    """The model's constructor as the trainer asks for it."""
    return LlamaStage(
        config.model,
        layers,
        num_positions=config.batch.sequence_length,
        tp=tp,
        policy=POLICIES[config.precision.policy],
        device=device,
    )
