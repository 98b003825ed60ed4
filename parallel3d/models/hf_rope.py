"""The settings of rotary positions in a Hugging Face config.json, in both directions. No torch.

They are one object since transformers 5, and were two fields before::

    "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, ...}
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, ...}

Both are read; the former is written, which all versions read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parallel3d.errors import shorten
from parallel3d.families.block_kinds import ROPE_TYPES
from parallel3d.families.spec import JsonFields

ROPE_THETA = 10000.0
"""Theirs, where a file has none."""
NAMES = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_positions": "original_max_position_embeddings",
}
"""Their name of each of our fields beside rope_theta and rope_type."""


def rope_section(fields: JsonFields, longest: object) -> dict[str, Any]:
    """Our fields of `model` for settings without problems; `longest` is the config's max_position_embeddings."""
    rope = {NAMES["rope_original_positions"]: longest} | _settings(fields)
    kind = _type(rope)
    scaling = {name: rope.get(NAMES[name]) for name in ROPE_TYPES[kind]}
    return {"rope_theta": rope.get("rope_theta", ROPE_THETA), "rope_type": kind, **scaling}


def rope_json(model: Mapping[str, Any]) -> JsonFields:
    """Their fields beside rope_theta for a section `model`: none without scaling."""
    kind = model["rope_type"]
    scaling = {NAMES[name]: model[name] for name in ROPE_TYPES[kind]}
    return {"rope_scaling": {"rope_type": kind, **scaling}} if scaling else {}


def rope_problems(fields: JsonFields) -> Iterator[str]:
    """What our models don't support."""
    for name in ("rope_scaling", "rope_parameters"):
        if fields.get(name) is not None and not isinstance(fields[name], dict):
            supported = f"null and an object with rope_type {', '.join(ROPE_TYPES)}"
            yield f"{name} is {shorten(repr(fields[name]))}; supported are {supported}"
            return
    rope, where = _settings(fields), "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    if (kind := _type(rope)) not in ROPE_TYPES:
        yield f"{where}.rope_type is {kind!r}; supported are {', '.join(ROPE_TYPES)}"
        return
    for name in ROPE_TYPES[kind]:
        value = rope.get(NAMES[name])
        if value is None and name != "rope_original_positions":
            yield f"{where}.{NAMES[name]} is missing, which rope_type {kind!r} needs"
        elif isinstance(value, bool) or not isinstance(value, int | float | None):
            yield f"{where}.{NAMES[name]} is {value!r}; supported are numbers"
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if share not in (None, 1):
        yield f"partial_rotary_factor is {share!r}; ours turn whole heads (1.0)"


def _settings(fields: JsonFields) -> JsonFields:
    old = {"rope_theta": fields["rope_theta"]} if "rope_theta" in fields else {}
    return old | (fields.get("rope_scaling") or {}) | (fields.get("rope_parameters") or {})


def _type(rope: JsonFields) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))
