"""Phi-3 (Abdin et al. 2024, "Phi-3 technical report"): Llama's blocks within Mistral's sliding window. Hugging Face
stores queries, keys and values as one tensor, and so gate and up."""

from __future__ import annotations

from collections.abc import Iterable

from parallel3d.errors import Problem
from parallel3d.families.block_kinds import RMS_NORM, ROTARY, SWIGLU, Values
from parallel3d.families.llama import DEFAULTS, NAMES, WEIGHTS, no_padding_token
from parallel3d.families.mistral import MistralFields
from parallel3d.families.spec import Family, HfModel, JsonFields


def _dropout(model: Values) -> JsonFields:
    """Theirs has one rate more, in the attention."""
    rates = {"resid_pdrop": model["hidden_dropout"], "embd_pdrop": model["hidden_dropout"], "attention_dropout": 0.0}
    return rates | no_padding_token(model)


def _check_rope(model: Values) -> Iterable[Problem]:
    if model["rope_type"] != "default":
        yield Problem(
            field="model.rope_type",
            value=model["rope_type"],
            rule="Hugging Face's phi3 does not have it",
            fix="Such a model can't be exported; it would need default",
        )


FAMILY = Family(
    name="phi3",
    norm=RMS_NORM,
    mlp=SWIGLU,
    positions=ROTARY,
    qkv_bias=False,
    output_bias=False,
    own_fields=MistralFields,
    window_field="sliding_window",
    hf_models=(
        HfModel(
            model_type="phi3",
            class_name="Phi3ForCausalLM",
            qkv_bias=False,
            base="model.",
            weights={
                **WEIGHTS,
                "layers.{}.attention.qkv": "model.layers.{}.self_attn.qkv_proj",
                "layers.{}.mlp.gate_up": "model.layers.{}.mlp.gate_up_proj",
            },
            names={**NAMES, "sliding_window": "sliding_window"},
            defaults={
                **DEFAULTS,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "sliding_window": None,
            },
            fixed={"hidden_act": "silu"},
            extra_fields=_dropout,
            check=_check_rope,
        ),
    ),
)
