"""Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from torch import nn

from models.decoder import Family
from parallel3d.config.derived import head_size
from parallel3d.config.schema import ModelConfig
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.placement import LayerContext
from parallel3d.layers.rotary import RotaryTable
from parallel3d.layers.swiglu import SwiGLU


class Llama(Family):
    """Also Qwen2, with `model.qkv_bias`."""

    def __init__(self, config: ModelConfig, *, num_positions: int, context: LayerContext):
        super().__init__(config, num_positions=num_positions, context=context)
        self.table = RotaryTable.build(
            num_positions, head_size(config), config.rope_theta, context.policy.keep_fp32_dtype, str(context.device)
        )

    def norm(self, name: str) -> nn.Module:
        return RMSNorm(f"{name}.weight", self.config.hidden_size, eps=self.config.rms_norm_eps, context=self.context)

    def mlp(self, name: str, *, output_init_std: float) -> nn.Module:
        return SwiGLU(
            name,
            hidden_size=self.config.hidden_size,
            intermediate_size=self.config.intermediate_size,
            init_std=self.config.initializer_range,
            output_init_std=output_init_std,
            context=self.context,
        )
