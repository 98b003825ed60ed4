"""Converts between a Hugging Face config.json and our section `model`, in both directions. No torch.

The tables are the families' (parallel3d/families): which of their fields is which of ours, what a missing field means,
and the values that are required because our model supports no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from parallel3d.config.derived import family_of, head_size, resolved_model
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import CheckpointError, ConfigError, Problem, shorten
from parallel3d.families import HF_MODELS
from parallel3d.families.block_kinds import Values
from parallel3d.families.spec import HfModel, JsonFields
from parallel3d.models.hf_rope import rope_json, rope_problems, rope_section
from parallel3d.number_formats import NUMBER_FORMATS

CONFIG = "config.json"

_HEADS = ("num_attention_heads", "hidden_size", "num_key_value_heads")


def hf_model_of(model: ModelConfig) -> HfModel:
    """Hugging Face's model type for a model. Raises ConfigError if no type computes the same function."""
    if model.module is not None:
        rule = "makes layers of your own, which Hugging Face does not know"
        fix = "`parallel3d convert to-safetensors CHECKPOINT FOLDER` writes the weights under the names of your modules"
        raise ConfigError([Problem(field="model.module", value=model.module, rule=rule, fix=fix)])
    family, values = family_of(model), _values(model)
    fitting = [hf for hf in family.hf_models if hf.qkv_bias in (None, values["qkv_bias"])]
    if not fitting:
        known = " or ".join(str(hf.qkv_bias).lower() for hf in family.hf_models) or "another family"
        rule = f"Hugging Face has no such model of the family {family.name}"
        raise ConfigError([Problem(field="model.qkv_bias", value=values["qkv_bias"], rule=rule, fix=f"Use {known}")])
    hf = fitting[0]
    if problems := [*_width_problems(values, hf), *hf.check(values)]:
        raise ConfigError(problems)
    return hf


def hf_config(model: ModelConfig) -> JsonFields:
    """The config.json of the Hugging Face model that is the same function; max_position_embeddings must be resolved."""
    hf, values = hf_model_of(model), _values(model)
    return {
        "architectures": [hf.class_name],
        "model_type": hf.model_type,
        **{theirs: values[ours] for ours, theirs in hf.names.items()},
        **hf.fixed,
        **(rope_json(values) if "rope_theta" in hf.names else {}),
        **hf.extra_fields(values),
    }


def read_hf_config(folder: Path) -> tuple[ModelConfig, JsonFields]:
    """Our resolved model section for a Hugging Face folder, and its config.json.

    Raises CheckpointError naming what is wrong.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}: give the Hugging Face folder that holds {CONFIG}")
    path = folder / CONFIG
    fields = read_json(path)
    return model_section(fields, str(path)), fields


def model_section(fields: JsonFields, where: str) -> ModelConfig:
    """The resolved section `model` of the model that a config.json describes.

    Raises CheckpointError, which begins with `where`, naming all that our models don't support.
    """
    model_type = str(fields.get("model_type"))
    if model_type not in HF_MODELS:
        known = ", ".join(sorted(HF_MODELS))
        raise CheckpointError(f"{where}: model_type is {fields.get('model_type')!r}; supported are {known}")
    family, hf = HF_MODELS[model_type]
    fields = hf.plain_fields(fields)
    if problems := [*_problems(fields, hf)]:
        raise CheckpointError(
            f"{where} describes a model that parallel3d does not support:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    theirs = {**hf.defaults, **fields}
    rope = rope_section(fields, theirs.get("max_position_embeddings")) if "rope_theta" in hf.names else {}
    values = {ours: theirs[name] for ours, name in hf.names.items()} | rope
    values["intermediate_size"] = values["intermediate_size"] or 4 * values["hidden_size"]
    values["num_key_value_heads"] = values.get("num_key_value_heads") or values["num_attention_heads"]
    values["qkv_bias"] = fields.get("qkv_bias", family.qkv_bias) if hf.qkv_bias is None else hf.qkv_bias
    try:
        model = resolved_model(ModelConfig(architecture=family.name, **values))
    except ValidationError as error:
        wrong = error.errors()[0]
        name = hf.names.get(str(wrong["loc"][0]), str(wrong["loc"][0]))
        rule = wrong["msg"].replace("Input should be", "must be")
        raise CheckpointError(f"{where}: {name} is {shorten(repr(wrong['input']))}: {rule}") from None
    if broken := next(iter(family.problems(model.model_dump())), None):
        field = broken.field.removeprefix("model.")
        raise CheckpointError(f"{where}: {hf.names.get(field, field)} is {broken.value!r}: {broken.rule}")
    return model


def read_json(path: Path) -> JsonFields:
    """The object in a JSON file; raises CheckpointError naming the file where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def _values(model: ModelConfig) -> Values:
    """The resolved section, with the width of heads in any case."""
    return resolved_model(model).model_dump() | {"head_dim": head_size(model)}


def _width_problems(model: Values, hf: HfModel) -> Iterator[Problem]:
    if "head_dim" not in hf.names and model["head_dim"] * model["num_attention_heads"] != model["hidden_size"]:
        yield Problem(
            field="model.head_dim",
            value=model["head_dim"],
            rule=f"heads of Hugging Face's {hf.model_type} are as wide together as model.hidden_size",
            fix="Such a model can't be exported; it would need null",
        )


def _problems(fields: JsonFields, hf: HfModel) -> Iterator[str]:
    for name in hf.names.values():
        value = fields.get(name, hf.defaults.get(name))
        if value is None and name not in hf.defaults:
            yield f"{name} is missing"
        elif value is not None and not isinstance(value, bool | int | float | str):
            supported = hf.supported.get(name, "a single number or text, true or false")
            yield f"{name} is {shorten(repr(value))}; supported is {supported}"
    for name, value in hf.fixed.items():
        if (fields.get(name, value) or None) != (value or None):  # null, false and 0 all mean none
            yield f"{name} is {shorten(repr(fields[name]))}; supported is {value!r}"
    yield from _head_problems(fields, hf)
    if (quantised := fields.get("quantization_config")) is not None:
        formats = ", ".join(each.stored_name for each in NUMBER_FORMATS)
        kind = shorten(repr(quantised))
        yield f"quantization_config is {kind}; supported are weights of the formats {formats} without it"
    if "rope_theta" in hf.names:
        yield from rope_problems(fields)


def _head_problems(fields: JsonFields, hf: HfModel) -> Iterator[str]:
    heads, size, few = (fields.get(hf.names.get(n, n), hf.defaults.get(hf.names.get(n, n))) for n in _HEADS)
    width = fields.get("head_dim", hf.defaults.get("head_dim"))
    has_width = "head_dim" in hf.names and width is not None
    if not isinstance(heads, int) or not isinstance(size, int):
        return
    if heads < 1 or (size % heads and not has_width):
        yield f"{hf.names['num_attention_heads']} is {heads}, which does not divide the width {size}"
    elif isinstance(few, int) and (few < 1 or heads % few):
        yield f"num_key_value_heads is {few}, which does not divide the {heads} heads"
    if width is not None and "head_dim" not in hf.names and width != size / max(heads, 1):
        yield f"head_dim is {width!r}; in a {hf.model_type} it is hidden_size / num_attention_heads"
