"""config.json of Hugging Face's Llama, Qwen2 and GPT-2 as our section `model`, in both directions. No torch.

One table a family: which of their fields is which of ours, what theirs are where the file leaves them out, and the
values that some must have because our model knows no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from parallel3d.config.derived import activation_function, has_qkv_bias, num_key_value_heads
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import CheckpointError

CONFIG = "config.json"

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class HfFamily:
    """One of Hugging Face's model types."""

    model_type: str
    class_name: str
    architecture: Literal["llama", "gpt2"]
    """Ours."""
    qkv_bias: bool
    base: str
    """What the names of its tensors begin with, and may be without where only the base model was saved."""
    names: Mapping[str, str]
    """Their name of each of our fields."""
    defaults: Fields
    """Theirs, by their names; a field in neither table is required."""
    fixed: Fields = field(default_factory=dict)
    """By their names: the only value that our model can be, which is also what a file without it means."""


_HEADS = ("num_attention_heads", "hidden_size", "num_key_value_heads")
_LLAMA_NAMES = {
    name: name
    for name in (
        "vocab_size",
        "max_position_embeddings",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "initializer_range",
        "tie_word_embeddings",
    )
}
_LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}

FAMILIES = (
    HfFamily(
        model_type="llama",
        class_name="LlamaForCausalLM",
        architecture="llama",
        qkv_bias=False,
        base="model.",
        names=_LLAMA_NAMES,
        defaults={**_LLAMA_DEFAULTS, "max_position_embeddings": 2048},
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ),
    HfFamily(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        architecture="llama",
        qkv_bias=True,
        base="model.",
        names=_LLAMA_NAMES,
        defaults={**_LLAMA_DEFAULTS, "max_position_embeddings": 32768},
        fixed={"hidden_act": "silu", "use_sliding_window": False},
    ),
    HfFamily(
        model_type="gpt2",
        class_name="GPT2LMHeadModel",
        architecture="gpt2",
        qkv_bias=True,
        base="transformer.",
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
    ),
)


def family_of(model: ModelConfig) -> HfFamily:
    """Hugging Face's family of a model. A Llama with biases on query, key and value is what is called Qwen2 there; a
    GPT-2 without them is one whose biases are zeros."""
    bias = has_qkv_bias(model) or model.architecture == "gpt2"
    return next(family for family in FAMILIES if (family.architecture, family.qkv_bias) == (model.architecture, bias))


def hf_config(model: ModelConfig) -> Fields:
    """The config.json of the Hugging Face model that is the same function; of a resolved configuration."""
    family = family_of(model)
    values = model.model_dump() | {
        "num_key_value_heads": num_key_value_heads(model),
        "activation_function": activation_function(model),
    }
    fields = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        **{theirs: values[ours] for ours, theirs in family.names.items()},
        **family.fixed,
    }
    if family.architecture == "gpt2":
        fields |= {**dict.fromkeys(("resid_pdrop", "embd_pdrop"), model.hidden_dropout), "attn_pdrop": 0.0}
        fields |= {} if has_qkv_bias(model) else {"qkv_bias": False}  # theirs ignores it; for the way back
    return fields


def read_hf_config(folder: Path) -> tuple[ModelConfig, Fields]:
    """Our model section for a Hugging Face folder, resolved, and its config.json.

    Raises CheckpointError, which says what is wrong.
    """
    path = folder / CONFIG
    fields = read_json(path)
    return model_section(fields, str(path)), fields


def model_section(fields: Fields, where: str) -> ModelConfig:
    """The section `model`, resolved, of the model that a config.json describes.

    Raises CheckpointError, beginning with `where`, with all that our models can't be.
    """
    families = {family.model_type: family for family in FAMILIES}
    family = families.get(str(fields.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"{where}: model_type is {fields.get('model_type')!r}; known are {', '.join(sorted(families))}"
        )
    if problems := [*_problems(fields, family)]:
        raise CheckpointError(
            f"{where} is of a model that parallel3d has not:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )
    theirs = family.defaults | fields | {"rope_theta": _rope(fields).get("rope_theta", 10000.0)}
    values = {ours: theirs[name] for ours, name in family.names.items()}
    values["intermediate_size"] = values["intermediate_size"] or 4 * values["hidden_size"]
    values["num_key_value_heads"] = values.get("num_key_value_heads") or values["num_attention_heads"]
    floats = {name for name, value in ModelConfig.model_fields.items() if value.annotation is float}
    values = {name: float(value) if name in floats else value for name, value in values.items()}
    try:
        qkv_bias = family.qkv_bias and fields.get("qkv_bias", True)
        return ModelConfig(architecture=family.architecture, qkv_bias=qkv_bias, **values)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = family.names.get(str(wrong["loc"][0]), str(wrong["loc"][0]))
        raise CheckpointError(f"{where}: {name} is {wrong['input']!r}: {wrong['msg']}") from None


def read_json(path: Path) -> Fields:
    """The object in a JSON file; CheckpointError naming it when there is none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _problems(fields: Fields, family: HfFamily) -> Iterator[str]:
    for name in family.names.values():
        value = fields.get(name, family.defaults.get(name))
        if value is None and name not in family.defaults:
            yield f"{name} is missing"
        elif value is not None and not isinstance(value, bool | int | float | str):
            yield f"{name} is {value!r}"
    for name, value in family.fixed.items():
        if fields.get(name, value) != value:
            yield f"{name} is {fields[name]!r}, ours is {value!r}"
    heads, size, few = (fields.get(family.names.get(n, n)) for n in _HEADS)
    if isinstance(heads, int) and isinstance(size, int) and (heads < 1 or size % heads):
        yield f"{family.names['num_attention_heads']} is {heads}, which does not divide the width {size}"
    elif isinstance(heads, int) and isinstance(few, int) and (few < 1 or heads % few):
        yield f"num_key_value_heads is {few}, which does not divide the {heads} heads"
    if "quantization_config" in fields:
        yield "its weights are quantised"
    if family.architecture == "llama":
        rope_type = _rope(fields).get("rope_type", _rope(fields).get("type", "default"))
        if rope_type != "default":
            yield f"its rotary positions are scaled ({rope_type!r}), ours are not"
        size, heads, width = (fields.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
        if width is not None and isinstance(size, int) and isinstance(heads, int) and width * heads != size:
            yield f"head_dim is {width!r}, ours is hidden_size / num_attention_heads"


def _rope(fields: Fields) -> Fields:
    """What is said of rotary positions: in one object since transformers 5, in two fields before."""
    old = {"rope_theta": fields["rope_theta"]} if "rope_theta" in fields else {}
    return old | (fields.get("rope_scaling") or {}) | (fields.get("rope_parameters") or {})
