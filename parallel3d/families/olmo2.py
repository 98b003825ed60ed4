"""OLMo 2 (OLMo team 2025, "2 OLMo 2 Furious"): Llama's blocks, but RMSNorm of what attention and MLP give instead of in
front of them, and RMSNorm of all queries and of all keys."""

from __future__ import annotations

from parallel3d.families.block_kinds import PROJECTION_NORM, RMS_NORM, ROTARY, SWIGLU
from parallel3d.families.llama import DEFAULTS, NAMES, QK_NORM_WEIGHTS, WEIGHTS, no_padding_token
from parallel3d.families.spec import Family, HfModel

_INPUT_NORMS = ("layers.{}.attention_norm", "layers.{}.mlp_norm")

FAMILY = Family(
    name="olmo2",
    norm=RMS_NORM,
    norms_inputs=False,
    norms_outputs=True,
    qk_norm=PROJECTION_NORM,
    mlp=SWIGLU,
    positions=ROTARY,
    qkv_bias=False,
    output_bias=False,
    hf_models=(
        HfModel(
            model_type="olmo2",
            class_name="Olmo2ForCausalLM",
            qkv_bias=False,
            base="model.",
            weights={
                **{ours: theirs for ours, theirs in WEIGHTS.items() if ours not in _INPUT_NORMS},
                **QK_NORM_WEIGHTS,
                "layers.{}.attention_output_norm": "model.layers.{}.post_attention_layernorm",
                "layers.{}.mlp_output_norm": "model.layers.{}.post_feedforward_layernorm",
            },
            names=NAMES,
            defaults={**DEFAULTS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
            fixed={"hidden_act": "silu", "attention_bias": False},
            extra_fields=no_padding_token,
        ),
    ),
)
