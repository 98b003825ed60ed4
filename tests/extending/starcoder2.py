"""StarCoder 2 (Lozhkov et al. 2024, "StarCoder 2 and The Stack v2"): GPT-2's norms, MLP and biases with Llama's rotary
positions and grouped-query attention, within Mistral's sliding window."""

from __future__ import annotations

from collections.abc import Iterable

from parallel3d.errors import Problem
from parallel3d.families.block_kinds import GELU_MLP, LAYER_NORM, ROTARY, Values
from parallel3d.families.llama import NAMES, WEIGHTS
from parallel3d.families.mistral import MistralFields
from parallel3d.families.spec import Family, HfModel


def _check_gelu(model: Values) -> Iterable[Problem]:
    if model["activation_function"] != "gelu_new":
        yield Problem(
            field="model.activation_function",
            value=model["activation_function"],
            rule="Hugging Face's starcoder2 has the approximation with tanh",
            fix="Such a model can't be exported; it would need gelu_new",
        )


FAMILY = Family(
    name="starcoder2",
    norm=LAYER_NORM,
    mlp=GELU_MLP,
    positions=ROTARY,
    qkv_bias=True,
    output_bias=True,
    own_fields=MistralFields,
    window_field="sliding_window",
    hf_models=(
        HfModel(
            model_type="starcoder2",
            class_name="Starcoder2ForCausalLM",
            qkv_bias=True,
            base="model.",
            weights={
                **WEIGHTS,
                "layers.{}.mlp.up": "model.layers.{}.mlp.c_fc",
                "layers.{}.mlp.down": "model.layers.{}.mlp.c_proj",
            },
            names={
                **{ours: theirs for ours, theirs in NAMES.items() if ours != "rms_norm_eps"},
                "layer_norm_eps": "norm_epsilon",
                "sliding_window": "sliding_window",
            },
            defaults={
                "num_key_value_heads": 2,
                "max_position_embeddings": 4096,
                "initializer_range": 0.018042,
                "norm_epsilon": 1e-5,
                "rope_theta": 10000.0,
                "sliding_window": None,
                "tie_word_embeddings": True,
            },
            fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
            check=_check_gelu,
        ),
    ),
)
