"""Fault tolerance: protocol/ decides (pure), coordinator/ serves, guardian/ watches, worker/ takes part.

drop_in/ offers it to any PyTorch training loop: `from parallel3d import elastic`, then elastic.init, DataParallel,
Sampler and steps. They are imported when they are used, since guardians do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel3d.elastic.drop_in.elastic_loop import DataParallel, Sampler, steps
    from parallel3d.elastic.drop_in.launch_script import init

__all__ = ["DataParallel", "Sampler", "init", "steps"]

_HOMES = {"init": "launch_script", **dict.fromkeys(("DataParallel", "Sampler", "steps"), "elastic_loop")}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"parallel3d.elastic.drop_in.{_HOMES[name]}"), name)
