"""Gemma (Gemma team 2024, "Gemma: open models based on Gemini research and technology"): RMSNorm with 1 + its weights,
GeGLU, and embedded tokens times the root of hidden_size."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt

from parallel3d.families.block_kinds import GEGLU, OFFSET_RMS_NORM, ROTARY, Values
from parallel3d.families.llama import DEFAULTS, NAMES, WEIGHTS, no_padding_token
from parallel3d.families.mistral import MistralFields
from parallel3d.families.spec import Family, HfModel, JsonFields

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_HEAD_DIM = 256


class WindowFields(MistralFields):
    """Fields of `model` of the later Gemmas, which have a window in some layers."""

    sliding_window_pattern: PositiveInt | None = None
    """Each layer whose number, counted from 1, is a multiple of this sees all tokens; the others have the window. Null:
    6 for gemma3, 2 for gemma2."""
    query_pre_attn_scalar: PositiveInt | None = None
    """Attention scores are divided by the root of this. Null: of the head size."""


WINDOW_NAMES = {name: name for name in WindowFields.model_fields}
WINDOW_SUPPORTED = {
    "sliding_window_pattern": f"a number n, or layer_types with {_GLOBAL} in each n-th layer and {_LOCAL} in the others"
}
OUTPUT_NORM_WEIGHTS = {
    "layers.{}.attention_output_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "layers.{}.mlp_output_norm": "model.layers.{}.post_feedforward_layernorm",
}
WINDOW_DEFAULTS: JsonFields = {
    **DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": _HEAD_DIM,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": _HEAD_DIM,
}
"""Of the types with windows, by their names."""


def plain_windows(fields: JsonFields) -> JsonFields:
    """transformers 5 writes the kind of each layer: sliding_window_pattern for it, or the list where none fits."""
    plain = dict(fields)
    if fields.get("query_pre_attn_scalar", _HEAD_DIM) == fields.get("head_dim", _HEAD_DIM):
        plain["query_pre_attn_scalar"] = None
    kinds: Any = fields.get("layer_types")
    if kinds is not None:
        found = [fields.get(name) for name in ("sliding_window_pattern", "_sliding_window_pattern")]
        candidates = [*found, *range(1, len(kinds) + 2)] if isinstance(kinds, list) else []
        fitting = (n for n in candidates if isinstance(n, int) and n > 0 and kinds == layer_types(n, len(kinds)))
        plain["sliding_window_pattern"] = next(fitting, kinds)
    return plain


def layer_types(pattern: int, num_layers: int) -> list[str]:
    return [_LOCAL if (layer + 1) % pattern else _GLOBAL for layer in range(num_layers)]


def window_fields(model: Values) -> JsonFields:
    """Written into config.json beside the fields with names."""
    return no_padding_token(model) | {
        "query_pre_attn_scalar": model["query_pre_attn_scalar"] or model["head_dim"],
        "layer_types": layer_types(model["sliding_window_pattern"], model["num_hidden_layers"]),
    }


def _plain_fields(fields: JsonFields) -> JsonFields:
    """Files of the first release say gelu and mean the approximation, as transformers reads them."""
    return {**fields, "hidden_act": "gelu_pytorch_tanh"} if fields.get("hidden_act") == "gelu" else fields


FAMILY = Family(
    name="gemma",
    norm=OFFSET_RMS_NORM,
    mlp=GEGLU,
    positions=ROTARY,
    qkv_bias=False,
    output_bias=False,
    scales_embedding=True,
    hf_models=(
        HfModel(
            model_type="gemma",
            class_name="GemmaForCausalLM",
            qkv_bias=False,
            base="model.",
            weights=WEIGHTS,
            names=NAMES,
            defaults={
                **DEFAULTS,
                "num_key_value_heads": 16,
                "head_dim": 256,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": True,
            },
            fixed={
                "hidden_act": "gelu_pytorch_tanh",
                "attention_bias": False,
                "use_bidirectional_attention": None,
            },
            extra_fields=no_padding_token,
            plain_fields=_plain_fields,
        ),
    ),
)
