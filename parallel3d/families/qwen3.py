"""Qwen3 (Yang et al. 2025, "Qwen3 technical report"): Llama's blocks, and RMSNorm of each query and key head."""

from __future__ import annotations

from parallel3d.families.block_kinds import HEAD_NORM, RMS_NORM, ROTARY, SWIGLU
from parallel3d.families.llama import DEFAULTS, NAMES, QK_NORM_WEIGHTS, WEIGHTS
from parallel3d.families.spec import Family, HfModel

FAMILY = Family(
    name="qwen3",
    norm=RMS_NORM,
    qk_norm=HEAD_NORM,
    mlp=SWIGLU,
    positions=ROTARY,
    qkv_bias=False,
    output_bias=False,
    hf_models=(
        HfModel(
            model_type="qwen3",
            class_name="Qwen3ForCausalLM",
            qkv_bias=False,
            base="model.",
            weights={**WEIGHTS, **QK_NORM_WEIGHTS},
            names=NAMES,
            defaults={**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
            fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
        ),
    ),
)
