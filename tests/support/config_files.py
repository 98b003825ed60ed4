"""A tiny configuration as a file, and the problems of changed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.load import load_config
from parallel3d.errors import ConfigError, Problem

TINY: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "batch": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 16},
    "optimizer": {"learning_rate": 0.001},
    "run": {"num_steps": 10},
}


def write(folder: Path, content: object, name: str = "tiny.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def problems(path: Path, *overrides: str, world_size: int | None = None) -> dict[str, Problem]:
    """Loads a configuration that must be refused; returns its problems by field, of which each has one."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, world_size=world_size)
    found = {problem.field: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems)
    return found
