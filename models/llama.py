"""Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from torch import Tensor, nn

from models.decoder import Family
from parallel3d.config.derived import has_qkv_bias, head_size, num_key_value_heads
from parallel3d.config.schema import ModelConfig
from parallel3d.layers.attention import CausalSelfAttention
from parallel3d.layers.dropout import dropout
from parallel3d.layers.init import depth_scale
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.placement import Placement
from parallel3d.layers.rotary import RotaryTable
from parallel3d.layers.swiglu import SwiGLU


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    def __init__(self, config: ModelConfig, index: int, table: RotaryTable, *, on: Placement):
        super().__init__()
        name, hidden_size, std = f"layers.{index}", config.hidden_size, config.initializer_range
        scale = depth_scale(config.initializer_depth_scaling, layer=index, num_layers=config.num_hidden_layers)
        self.index, self.table, self.tp, self.drop = index, table, on.tp, config.hidden_dropout
        self.attention_norm = RMSNorm(f"{name}.attention_norm.weight", hidden_size, eps=config.rms_norm_eps, on=on)
        self.attention = CausalSelfAttention(
            f"{name}.attention",
            hidden_size=hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=num_key_value_heads(config),
            init_std=std,
            output_init_std=std * scale,
            qkv_bias=has_qkv_bias(config),
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

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        mixed = self.attention(self.attention_norm(x), self.table, micro_batch)
        x = x + self._dropout(mixed, micro_batch, "attention")
        return x + self._dropout(self.mlp(self.mlp_norm(x), micro_batch), micro_batch, "mlp")

    def _dropout(self, x: Tensor, micro_batch: MicroBatch, site: str) -> Tensor:
        return dropout(x, self.drop, micro_batch=micro_batch, layer=self.index, site=site, tp=self.tp)


class Llama(Family):
    """One rotary table serves all layers of a stage."""

    def __init__(self, config: ModelConfig, *, num_positions: int, on: Placement):
        self._config = config
        self._on = on
        self._table = RotaryTable.build(
            num_positions, head_size(config), config.rope_theta, on.policy.sensitive, str(on.device)
        )

    def layer(self, index: int) -> nn.Module:
        return LlamaLayer(self._config, index, self._table, on=self._on)

    def norm(self, name: str) -> nn.Module:
        return RMSNorm(f"{name}.weight", self._config.hidden_size, eps=self._config.rms_norm_eps, on=self._on)
