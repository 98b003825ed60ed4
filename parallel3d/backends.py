"""torch's kernels or NVIDIA apex's: which of them a run takes.

apex is known by what it defines, never by its name alone: PyPI's `apex` is another project. Its kernels are for CUDA.
They have never been run here: what is tested is the way they are called, and the formulas that they are to compute.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

from parallel3d.errors import ConfigError, Problem

Backend = Literal["torch", "apex"]

APEX_DEVICES = ("cuda",)


def find_symbol(module: str, name: str) -> Any | None:
    """What `module` calls `name`; None where there is no such module, or it has no such name."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def choose_backend(field: str, asked: str, *, module: str, name: str, device_type: str) -> Backend:
    """The backend that the configuration's `field` means by "torch", "apex" or "auto" (apex where it can be had).

    `module` and `name` are apex's symbol. Raises ConfigError where apex is asked for and can't be had.
    """
    if asked == "torch":
        return "torch"
    lacks = []
    if device_type not in APEX_DEVICES:
        lacks.append(f"the run is on {device_type}, and apex's kernels are for CUDA")
    if find_symbol(module, name) is None:
        lacks.append(f"there is no {module}.{name} here (PyPI's apex is another project)")
    if not lacks:
        return "apex"
    if asked == "auto":
        return "torch"
    fix = "Build github.com/NVIDIA/apex with its CUDA extensions, or take torch or auto"
    raise ConfigError([Problem(field=field, value=asked, rule="; ".join(lacks), fix=fix)])
