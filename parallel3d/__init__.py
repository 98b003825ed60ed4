"""Pre-training of language models in three dimensions that survives its failures.

`parallel3d.train(...)` runs a training from Python (docs/python.md). What the package offers is imported when it is
used, so that `import parallel3d` itself loads nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel3d.door.callbacks import Callback, StopTraining
    from parallel3d.door.early_stopping import EarlyStopping
    from parallel3d.door.result import TrainResult
    from parallel3d.door.train_call import train
    from parallel3d.models.user_parts import Column, Divided, ModelParts, Partial, Row, Whole

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Column",
    "Divided",
    "EarlyStopping",
    "ModelParts",
    "Partial",
    "Row",
    "StopTraining",
    "TrainResult",
    "Whole",
    "train",
]

_HOMES = {
    "Callback": "parallel3d.door.callbacks",
    "EarlyStopping": "parallel3d.door.early_stopping",
    "StopTraining": "parallel3d.door.callbacks",
    "TrainResult": "parallel3d.door.result",
    "train": "parallel3d.door.train_call",
    **dict.fromkeys(("Column", "Divided", "ModelParts", "Partial", "Row", "Whole"), "parallel3d.models.user_parts"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
