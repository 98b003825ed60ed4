"""Gemma 3's decoder of text (Gemma team 2025, "Gemma 3 technical report"): RMSNorm before and after each block with
1 + its weights, RMSNorm of each query and key head, GeGLU, and embedded tokens times the root of hidden_size. Five of
six layers have a sliding window, and a rotary base of their own."""

from __future__ import annotations

from pydantic import PositiveFloat

from parallel3d.families.block_kinds import GEGLU, HEAD_NORM, OFFSET_RMS_NORM, ROTARY
from parallel3d.families.gemma import (
    OUTPUT_NORM_WEIGHTS,
    WINDOW_DEFAULTS,
    WINDOW_NAMES,
    WINDOW_SUPPORTED,
    WindowFields,
    plain_windows,
    window_fields,
)
from parallel3d.families.llama import NAMES, QK_NORM_WEIGHTS, WEIGHTS
from parallel3d.families.spec import Family, HfModel, JsonFields, LocalLayers

_LOCAL_BASE, _GLOBAL_BASE = 1e4, 1e6


class Gemma3Fields(WindowFields):
    """Gemma 3's own fields of `model`."""

    rope_local_base_freq: PositiveFloat = _LOCAL_BASE
    """Base of the rotary frequencies in layers with the window, which no rope_type scales."""


def _plain_fields(fields: JsonFields) -> JsonFields:
    """transformers 5 writes rotary settings by kind of layer, too."""
    plain, rope = plain_windows(fields), fields.get("rope_parameters")
    by_kind = rope if isinstance(rope, dict) else {}
    of_all, of_local = (by_kind.get(f"{kind}_attention") for kind in ("full", "sliding"))
    if isinstance(of_all, dict) and isinstance(of_local, dict):
        plain["rope_parameters"] = of_all
        plain["rope_local_base_freq"] = of_local.get("rope_theta", _LOCAL_BASE)
        plain["rope_local_type"] = of_local.get("rope_type", "default")
    elif "rope_theta" not in fields and not rope:
        plain["rope_theta"] = _GLOBAL_BASE
    return plain


FAMILY = Family(
    name="gemma3",
    norm=OFFSET_RMS_NORM,
    norms_outputs=True,
    qk_norm=HEAD_NORM,
    mlp=GEGLU,
    positions=ROTARY,
    qkv_bias=False,
    output_bias=False,
    own_fields=Gemma3Fields,
    own_defaults={"sliding_window_pattern": 6},
    window_field="sliding_window",
    local_layers=LocalLayers(every_field="sliding_window_pattern", theta_field="rope_local_base_freq"),
    score_field="query_pre_attn_scalar",
    scales_embedding=True,
    hf_models=(
        HfModel(
            model_type="gemma3_text",
            class_name="Gemma3ForCausalLM",
            qkv_bias=False,
            base="model.",
            weights={**WEIGHTS, **QK_NORM_WEIGHTS, **OUTPUT_NORM_WEIGHTS},
            names={**NAMES, **WINDOW_NAMES, "rope_local_base_freq": "rope_local_base_freq"},
            defaults={
                **WINDOW_DEFAULTS,
                "max_position_embeddings": 131072,
                "sliding_window_pattern": 6,
                "rope_local_base_freq": _LOCAL_BASE,
            },
            fixed={
                "hidden_activation": "gelu_pytorch_tanh",
                "attention_bias": False,
                "use_bidirectional_attention": False,
                "rope_local_type": "default",
                "final_logit_softcapping": None,
                "attn_logit_softcapping": None,
            },
            supported=WINDOW_SUPPORTED,
            extra_fields=window_fields,
            plain_fields=_plain_fields,
        ),
    ),
)
