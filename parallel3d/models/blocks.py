"""Builds the blocks that a family's row names (parallel3d/families): its norms, its MLPs and its positions.

A new kind of block is a layer in parallel3d/layers, a row in parallel3d/families/block_kinds.py and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import nn

from parallel3d.config.derived import family_of, head_size, is_local, num_key_value_heads
from parallel3d.config.schema import ModelConfig
from parallel3d.families.block_kinds import (
    GEGLU,
    GELU_MLP,
    LAYER_NORM,
    LEARNED,
    OFFSET_RMS_NORM,
    RMS_NORM,
    ROTARY,
    SWIGLU,
)
from parallel3d.kernels.layer_kernels import Activation
from parallel3d.kernels.torch_rotary import HeadLayout
from parallel3d.layers.gated_mlp import GatedMlp
from parallel3d.layers.gelu_mlp import GeluMlp
from parallel3d.layers.norm import LayerNorm, RMSNorm
from parallel3d.layers.placement import LayerContext
from parallel3d.layers.positions import LearnedPositions
from parallel3d.layers.qk_norm import HeadNorm, ProjectionNorm
from parallel3d.layers.rotary import FrequencyScaling, RotaryTable


class BlockBuilder:
    """The blocks of one stage, for sequences of up to `num_positions` tokens.

    `config` needs its nulls filled in, as by `derived.resolved_model`.
    """

    def __init__(self, config: ModelConfig, *, num_positions: int, context: LayerContext):
        self.config = config
        self.num_positions = num_positions
        self.context = context
        self.family = family_of(config)

    def norm(self, name: str) -> nn.Module:
        """A norm: x and delta (tokens_local, hidden), or x alone -> the sum, and its norm."""
        return _NORMS[self.family.norm.name](self, name)

    def input_norm(self, name: str) -> nn.Module | None:
        """A norm in front of attention or MLP; None where the family has none."""
        return self.norm(name) if self.family.norms_inputs else None

    def output_norm(self, name: str) -> nn.Module | None:
        """A norm of what attention or MLP gives; None where the family has none."""
        return self.norm(name) if self.family.norms_outputs else None

    def qk_norm(self, name: str) -> nn.Module | None:
        """A norm of queries and keys: qkv (tokens, q + k + v) -> the same; None where the family has none."""
        if self.family.qk_norm is None:
            return None
        num_heads, num_kv_heads = self.config.num_attention_heads, num_key_value_heads(self.config)
        heads = HeadLayout.of_rank(self.context.tp.group.size, num_heads, num_kv_heads, head_size(self.config))
        eps, context = self.config.rms_norm_eps, self.context
        if self.family.qk_norm.is_of_heads:
            return HeadNorm(name, heads, eps=eps, offset=self.family.norm.offset, context=context)
        return ProjectionNorm(name, heads, num_heads=num_heads, num_kv_heads=num_kv_heads, eps=eps, context=context)

    def mlp(self, name: str, output_init_std: float) -> nn.Module:
        """A layer's MLP: (x (tokens_local, hidden), micro_batch) -> the shape of x."""
        return _MLPS[self.family.mlp.name](self, name, output_init_std)

    def positions(self) -> nn.Module | None:
        """Adds positions to the embedded tokens: (x (tokens_local, hidden), micro_batch) -> the shape of x; None where
        the family has other positions."""
        if self.family.positions is not LEARNED:
            return None
        return LearnedPositions(
            "positions.weight",
            self.config.max_position_embeddings or self.num_positions,
            self.config.hidden_size,
            init_std=self.config.initializer_range,
            context=self.context,
        )

    def value_of(self, field: str | None) -> float | None:
        """The value of one of the family's own fields of `model`; None without a field."""
        return None if field is None else getattr(self.config, field)

    def rotary_table(self, layer: int) -> RotaryTable | None:
        """Rotates queries and keys, the same table in all layers of one kind; None where the family has other
        positions."""
        if self.family.positions is not ROTARY:
            return None
        local = self.family.local_layers
        has_own = local is not None and local.theta_field is not None and is_local(self.config, layer)
        return self._local_rotary_table if has_own else self._rotary_table

    @cached_property
    def _rotary_table(self) -> RotaryTable:
        return self._build_table(self.config.rope_theta, _frequency_scaling(self.config))

    @cached_property
    def _local_rotary_table(self) -> RotaryTable:
        assert self.family.local_layers is not None and self.family.local_layers.theta_field is not None
        return self._build_table(getattr(self.config, self.family.local_layers.theta_field), None)

    def _build_table(self, theta: float, scaling: FrequencyScaling | None) -> RotaryTable:
        dtype, device = self.context.policy.keep_fp32_dtype, str(self.context.device)
        return RotaryTable.build(self.num_positions, head_size(self.config), theta, dtype, device, scaling)


def _frequency_scaling(config: ModelConfig) -> FrequencyScaling | None:
    if config.rope_type == "default":
        return None
    assert config.rope_factor is not None, "needs a configuration that obeys the rules"
    return FrequencyScaling(
        factor=config.rope_factor,
        low=config.rope_low_freq_factor,
        high=config.rope_high_freq_factor,
        original_positions=config.rope_original_positions,
    )


def _rms_norm(build: BlockBuilder, name: str) -> nn.Module:
    config, offset = build.config, build.family.norm.offset
    return RMSNorm(f"{name}.weight", config.hidden_size, eps=config.rms_norm_eps, offset=offset, context=build.context)


def _layer_norm(build: BlockBuilder, name: str) -> nn.Module:
    return LayerNorm(name, build.config.hidden_size, eps=build.config.layer_norm_eps, context=build.context)


def _swiglu(build: BlockBuilder, name: str, output_init_std: float) -> nn.Module:
    return _gated_mlp(build, name, output_init_std, build.context.kernels.silu_times)


def _geglu(build: BlockBuilder, name: str, output_init_std: float) -> nn.Module:
    return _gated_mlp(build, name, output_init_std, build.context.kernels.gelu_times)


def _gated_mlp(build: BlockBuilder, name: str, output_init_std: float, activation: Activation) -> nn.Module:
    return GatedMlp(
        name,
        hidden_size=build.config.hidden_size,
        intermediate_size=build.config.intermediate_size,
        init_std=build.config.initializer_range,
        output_init_std=output_init_std,
        activation=activation,
        context=build.context,
    )


def _gelu_mlp(build: BlockBuilder, name: str, output_init_std: float) -> nn.Module:
    assert build.config.activation_function is not None, "needs a resolved configuration"
    return GeluMlp(
        name,
        hidden_size=build.config.hidden_size,
        intermediate_size=build.config.intermediate_size,
        activation_function=build.config.activation_function,
        init_std=build.config.initializer_range,
        output_init_std=output_init_std,
        context=build.context,
    )


_NORMS: dict[str, Callable[[BlockBuilder, str], nn.Module]] = {
    RMS_NORM.name: _rms_norm,
    OFFSET_RMS_NORM.name: _rms_norm,
    LAYER_NORM.name: _layer_norm,
}
_MLPS: dict[str, Callable[[BlockBuilder, str, float], nn.Module]] = {
    SWIGLU.name: _swiglu,
    GEGLU.name: _geglu,
    GELU_MLP.name: _gelu_mlp,
}
