"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, biases, an MLP with GELU."""

from __future__ import annotations

from torch import nn

from models.decoder import Family
from parallel3d.config.derived import activation_function
from parallel3d.layers.gelu_mlp import GeluMlp
from parallel3d.layers.norm import LayerNorm
from parallel3d.layers.positions import LearnedPositions


class Gpt2(Family):
    """Has as many positions as the configuration says, or as `num_positions` asks for."""

    has_output_bias = True

    def positions(self) -> nn.Module:
        return LearnedPositions(
            "positions.weight",
            self.config.max_position_embeddings or self.num_positions,
            self.config.hidden_size,
            init_std=self.config.initializer_range,
            context=self.context,
        )

    def norm(self, name: str) -> nn.Module:
        return LayerNorm(name, self.config.hidden_size, eps=self.config.layer_norm_eps, context=self.context)

    def mlp(self, name: str, *, output_init_std: float) -> nn.Module:
        return GeluMlp(
            name,
            hidden_size=self.config.hidden_size,
            intermediate_size=self.config.intermediate_size,
            activation_function=activation_function(self.config),
            init_std=self.config.initializer_range,
            output_init_std=output_init_std,
            context=self.context,
        )
