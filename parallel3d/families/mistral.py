"""Mistral (Jiang et al. 2023, "Mistral 7B"): Llama's blocks, and attention within a sliding window."""

from __future__ import annotations

from pydantic import PositiveInt

from parallel3d.config.sections.section import Section
from parallel3d.families.block_kinds import RMS_NORM, ROTARY, SWIGLU
from parallel3d.families.llama import DEFAULTS, NAMES, WEIGHTS
from parallel3d.families.spec import Family, HfModel


class MistralFields(Section):
    """Mistral's own fields of `model`."""

    sliding_window: PositiveInt | None = None
    """Keys that a query sees, its own token included (section 2 of Mistral's paper: 4096). Null: all before it."""


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
            weights=WEIGHTS,
            names={**NAMES, "sliding_window": "sliding_window"},
            defaults={
                **DEFAULTS,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
            },
            fixed={"hidden_act": "silu"},
        ),
    ),
)
