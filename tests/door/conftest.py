"""A tiny run on a text that every machine has, as a dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "docs.txt"
    path.write_text("\n".join(page.read_text() for page in sorted(DOCS.glob("*.md"))))
    return path


@pytest.fixture
def tiny(tmp_path: Path, text: Path) -> dict[str, Any]:
    """A configuration of one process and 6 steps."""
    return {
        "model": {
            "vocab_size": 257,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "batch": {"global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 32},
        "optimizer": {"learning_rate": 0.01},
        "data": {
            "sources": [text],
            "cache_directory": text.parent / "cache",
            "tokenizer": {"kind": "bytes"},
        },
        "checkpoint": {"every": 3},
        "monitor": {"charts": False},
        "run": {"num_steps": 6, "threads_per_rank": 1, "evaluate_batches": 1, "directory": tmp_path / "run"},
    }
