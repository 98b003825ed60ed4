"""Gemma 2 (Gemma team 2024, "Gemma 2: improving open language models at a practical size"): RMSNorm before and after
each block with 1 + its weights, GeGLU, embedded tokens times the root of hidden_size, a sliding window in every other
layer, and soft caps: scores and logits x become c tanh(x / c)."""

from __future__ import annotations

from pydantic import PositiveFloat

from parallel3d.families.block_kinds import GEGLU, OFFSET_RMS_NORM, ROTARY
from parallel3d.families.gemma import (
    OUTPUT_NORM_WEIGHTS,
    WINDOW_DEFAULTS,
    WINDOW_NAMES,
    WINDOW_SUPPORTED,
    WindowFields,
    plain_windows,
    window_fields,
)
from parallel3d.families.llama import NAMES, WEIGHTS
from parallel3d.families.spec import Family, HfModel, LocalLayers

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


class Gemma2Fields(WindowFields):
    """Gemma 2's own fields of `model`."""

    attn_logit_softcapping: PositiveFloat | None = None
    """Attention scores x become c tanh(x / c) with this c (Gemma 2: 50). Null: they stay. With a cap, attention is
    computed by products over blocks of queries, not by fused kernels."""
    final_logit_softcapping: PositiveFloat | None = None
    """Logits x become c tanh(x / c) with this c (Gemma 2: 30). Null: they stay."""


FAMILY = Family(
    name="gemma2",
    norm=OFFSET_RMS_NORM,
    norms_outputs=True,
    mlp=GEGLU,
    positions=ROTARY,
    qkv_bias=False,
    output_bias=False,
    own_fields=Gemma2Fields,
    own_defaults={"sliding_window_pattern": 2},
    window_field="sliding_window",
    local_layers=LocalLayers(every_field="sliding_window_pattern"),
    score_field="query_pre_attn_scalar",
    score_cap_field="attn_logit_softcapping",
    logit_cap_field="final_logit_softcapping",
    scales_embedding=True,
    hf_models=(
        HfModel(
            model_type="gemma2",
            class_name="Gemma2ForCausalLM",
            qkv_bias=False,
            base="model.",
            weights={**WEIGHTS, **OUTPUT_NORM_WEIGHTS},
            names={**NAMES, **WINDOW_NAMES, **{name: name for name in _CAPS}},
            defaults={
                **WINDOW_DEFAULTS,
                "max_position_embeddings": 8192,
                "sliding_window_pattern": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            fixed={
                "hidden_activation": "gelu_pytorch_tanh",
                "attention_bias": False,
                "use_bidirectional_attention": None,
            },
            supported=WINDOW_SUPPORTED,
            extra_fields=window_fields,
            plain_fields=plain_windows,
        ),
    ),
)
