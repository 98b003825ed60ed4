"""The model families, one file each: every module in this folder that defines a FAMILY adds it, and every
entry point of the group parallel3d.families.

A family's file is data alone (no torch), so that the configuration, the planner and the conversion read the same row.
docs/extending.md shows how to add one.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from parallel3d.families.spec import Family, HfModel
from parallel3d.user_code import installed

_modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
_found: list[Family] = [module.FAMILY for module in _modules if hasattr(module, "FAMILY")]
_found += installed("parallel3d.families")

FAMILIES: dict[str, Family] = {
    family.name: family for family in sorted(_found, key=lambda family: (not family.is_default, family.name))
}
"""By name, which is `model.architecture`; the default comes first."""

DEFAULT_FAMILY = next(family.name for family in FAMILIES.values() if family.is_default)

HF_MODELS: dict[str, tuple[Family, HfModel]] = {
    hf.model_type: (family, hf) for family in FAMILIES.values() for hf in family.hf_models
}
"""By Hugging Face's `model_type`."""

assert len(_found) == len(FAMILIES) and sum(family.is_default for family in _found) == 1, "two families of one name"
assert len(HF_MODELS) == sum(len(family.hf_models) for family in _found), "two families read one model_type"
