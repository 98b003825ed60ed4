"""Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

With biases on query, key and value (`model.qkv_bias`) Hugging Face calls it Qwen2.
"""

from __future__ import annotations

from parallel3d.families.block_kinds import RMS_NORM, ROTARY, SWIGLU, Values
from parallel3d.families.spec import Family, HfModel, JsonFields

WEIGHTS: dict[str, str | tuple[str, ...]] = {
    "embedding": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.qkv": (
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    ),
    "layers.{}.attention.output": "model.layers.{}.self_attn.o_proj",
    "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp.gate_up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "layers.{}.mlp.down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
QK_NORM_WEIGHTS = {
    "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
}
"""Of families that norm queries and keys."""
NAMES = {
    name: name
    for name in (
        "vocab_size",
        "max_position_embeddings",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "initializer_range",
        "tie_word_embeddings",
    )
}
DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def no_padding_token(_model: Values) -> JsonFields:
    """For types whose default is a token that a small vocabulary lacks, and whose embedding has no gradient."""
    return {"pad_token_id": None}


FAMILY = Family(
    name="llama",
    is_default=True,
    norm=RMS_NORM,
    mlp=SWIGLU,
    positions=ROTARY,
    qkv_bias=False,
    output_bias=False,
    hf_models=(
        HfModel(
            model_type="llama",
            class_name="LlamaForCausalLM",
            qkv_bias=False,
            base="model.",
            weights=WEIGHTS,
            names=NAMES,
            defaults={**DEFAULTS, "max_position_embeddings": 2048},
            fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        ),
        HfModel(
            model_type="qwen2",
            class_name="Qwen2ForCausalLM",
            qkv_bias=True,
            base="model.",
            weights=WEIGHTS,
            names=NAMES,
            defaults={**DEFAULTS, "max_position_embeddings": 32768},
            fixed={"hidden_act": "silu", "use_sliding_window": False},
        ),
    ),
)
