"""Chooses between torch's kernels and NVIDIA apex's.

apex is recognised by the symbols that it defines, not by its name: PyPI's `apex` is another project. Its kernels are
for CUDA and have not been run yet: tests call stand-ins that compute the documented formulas.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

from parallel3d.errors import ConfigError, Problem

Backend = Literal["torch", "apex"]

APEX_DEVICES = ("cuda",)


def find_symbol(module: str, name: str) -> Any | None:
    """The object `name` of `module`; None if the module or the name does not exist."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def choose_backend(field: str, asked: str, *, module: str, name: str, device_type: str) -> Backend:
    """The backend for the value "torch", "apex" or "auto" (apex if available) of the configuration's `field`.

    `module` and `name` are apex's symbol. Raises ConfigError if apex is required and not available.
    """
    if asked == "torch":
        return "torch"
    lacks = []
    if device_type not in APEX_DEVICES:
        lacks.append(f"the run is on {device_type}, and apex's kernels are for CUDA")
    if find_symbol(module, name) is None:
        lacks.append(f"{module}.{name} is not installed (PyPI's apex is another project)")
    if not lacks:
        return "apex"
    if asked == "auto":
        return "torch"
    fix = "Build github.com/NVIDIA/apex with its CUDA extensions, or use torch or auto"
    raise ConfigError([Problem(field=field, value=asked, rule="; ".join(lacks), fix=fix)])
