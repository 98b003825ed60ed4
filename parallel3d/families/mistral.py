"""Mistral (Jiang et al. 2023, "Mistral 7B"): Llama's blocks, and attention within a sliding window."""

from __future__ import annotations

from pydantic import PositiveInt

from parallel3d.config.sections.section import Section
from parallel3d.families.block_kinds import RMS_NORM, ROTARY, SWIGLU
from parallel3d.families.spec import Family, HfModel


class MistralFields(Section):
    """Mistral's own fields of `model`."""

    sliding_window: PositiveInt | None = None
    """Keys that a query of mistral sees, its own token included (section 2 of the paper: 4096). Null: all before it."""


FAMILY = Family(
    name="mistral",
    norm=RMS_NORM,
    mlp=SWIGLU,
    positions=ROTARY,
    qkv_bias=False,
    output_bias=False,
    own_fields=MistralFields,
    window_field="sliding_window",
    hf_models=(
        HfModel(
            model_type="mistral",
            class_name="MistralForCausalLM",
            qkv_bias=False,
            base="model.",
            weights={
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
            },
            names={
                name: name
                for name in (
                    "vocab_size",
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "max_position_embeddings",
                    "initializer_range",
                    "rms_norm_eps",
                    "rope_theta",
                    "sliding_window",
                    "tie_word_embeddings",
                )
            },
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "initializer_range": 0.02,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "sliding_window": 4096,
                "tie_word_embeddings": False,
            },
            fixed={"hidden_act": "silu"},
        ),
    ),
)
