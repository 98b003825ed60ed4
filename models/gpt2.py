"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, biases, an MLP with GELU."""

from __future__ import annotations

from torch import Tensor, nn

from models.decoder import Family
from parallel3d.config.derived import activation_function, has_qkv_bias, num_key_value_heads
from parallel3d.config.schema import ModelConfig
from parallel3d.layers.attention import CausalSelfAttention
from parallel3d.layers.dropout import dropout
from parallel3d.layers.gelu_mlp import GeluMlp
from parallel3d.layers.init import depth_scale
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.norm import LayerNorm
from parallel3d.layers.placement import Placement
from parallel3d.layers.positions import LearnedPositions


class Gpt2Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, index: int, *, on: Placement):
        super().__init__()
        name, hidden_size, std = f"layers.{index}", config.hidden_size, config.initializer_range
        scale = depth_scale(config.initializer_depth_scaling, layer=index, num_layers=config.num_hidden_layers)
        self.index, self.tp, self.drop = index, on.tp, config.hidden_dropout
        self.attention_norm = LayerNorm(f"{name}.attention_norm", hidden_size, eps=config.layer_norm_eps, on=on)
        self.attention = CausalSelfAttention(
            f"{name}.attention",
            hidden_size=hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=num_key_value_heads(config),
            init_std=std,
            output_init_std=std * scale,
            qkv_bias=has_qkv_bias(config),
            output_bias=True,
            on=on,
        )
        self.mlp_norm = LayerNorm(f"{name}.mlp_norm", hidden_size, eps=config.layer_norm_eps, on=on)
        self.mlp = GeluMlp(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.intermediate_size,
            activation_function=activation_function(config),
            init_std=std,
            output_init_std=std * scale,
            on=on,
        )

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        mixed = self.attention(self.attention_norm(x), None, micro_batch)
        x = x + self._dropout(mixed, micro_batch, "attention")
        return x + self._dropout(self.mlp(self.mlp_norm(x), micro_batch), micro_batch, "mlp")

    def _dropout(self, x: Tensor, micro_batch: MicroBatch, site: str) -> Tensor:
        return dropout(x, self.drop, micro_batch=micro_batch, layer=self.index, site=site, tp=self.tp)


class Gpt2(Family):
    """Has as many positions as the configuration says, or as `num_positions` asks for."""

    def __init__(self, config: ModelConfig, *, num_positions: int, on: Placement):
        self._config = config
        self._num_positions = config.max_position_embeddings or num_positions
        self._on = on

    def positions(self) -> nn.Module:
        config = self._config
        return LearnedPositions(
            "positions.weight",
            self._num_positions,
            config.hidden_size,
            init_std=config.initializer_range,
            on=self._on,
        )

    def layer(self, index: int) -> nn.Module:
        return Gpt2Layer(self._config, index, on=self._on)

    def norm(self, name: str) -> nn.Module:
        return LayerNorm(name, self._config.hidden_size, eps=self._config.layer_norm_eps, on=self._on)
