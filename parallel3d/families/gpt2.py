"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, biases, an MLP with GELU."""

from __future__ import annotations

from collections.abc import Iterable

from parallel3d.errors import Problem
from parallel3d.families.block_kinds import GELU_MLP, LAYER_NORM, LEARNED, Values
from parallel3d.families.spec import Family, HfModel, JsonFields


def _dropout_and_bias(model: Values) -> JsonFields:
    """Theirs has one dropout rate more, in the attention. It ignores qkv_bias, which our reader needs."""
    fields = {"resid_pdrop": model["hidden_dropout"], "embd_pdrop": model["hidden_dropout"], "attn_pdrop": 0.0}
    return fields if model["qkv_bias"] else {**fields, "qkv_bias": False}


def _check_heads(model: Values) -> Iterable[Problem]:
    if model["num_key_value_heads"] != model["num_attention_heads"]:
        yield Problem(
            field="model.num_key_value_heads",
            value=model["num_key_value_heads"],
            rule="Hugging Face's GPT-2 has one key-value head for each query head",
            fix=f"Such a model can't be exported; it would need {model['num_attention_heads']}",
        )


FAMILY = Family(
    name="gpt2",
    norm=LAYER_NORM,
    mlp=GELU_MLP,
    positions=LEARNED,
    qkv_bias=True,
    output_bias=True,
    hf_models=(
        HfModel(
            model_type="gpt2",
            class_name="GPT2LMHeadModel",
            base="transformer.",
            weights={
                "embedding": "transformer.wte",
                "positions": "transformer.wpe",
                "layers.{}.attention_norm": "transformer.h.{}.ln_1",
                "layers.{}.attention.qkv": "transformer.h.{}.attn.c_attn",
                "layers.{}.attention.output": "transformer.h.{}.attn.c_proj",
                "layers.{}.mlp_norm": "transformer.h.{}.ln_2",
                "layers.{}.mlp.up": "transformer.h.{}.mlp.c_fc",
                "layers.{}.mlp.down": "transformer.h.{}.mlp.c_proj",
                "final_norm": "transformer.ln_f",
                "head": "lm_head",
            },
            transposed=True,
            zero_biases=("layers.{}.attention.qkv",),
            names={
                "vocab_size": "vocab_size",
                "max_position_embeddings": "n_positions",
                "hidden_size": "n_embd",
                "intermediate_size": "n_inner",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "activation_function": "activation_function",
                "layer_norm_eps": "layer_norm_epsilon",
                "initializer_range": "initializer_range",
                "tie_word_embeddings": "tie_word_embeddings",
            },
            defaults={
                "n_positions": 1024,
                "n_inner": None,
                "activation_function": "gelu_new",
                "layer_norm_epsilon": 1e-5,
                "initializer_range": 0.02,
                "tie_word_embeddings": True,
            },
            fixed={
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                "add_cross_attention": False,
            },
            extra_fields=_dropout_and_bias,
            check=_check_heads,
        ),
    ),
)
