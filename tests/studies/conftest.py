"""A text, and the configuration of a tiny run on it, in the working directory of the test."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

TINY = {
    "model": {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "batch": {"global_batch_size": 8, "micro_batch_size": 4, "sequence_length": 16},
    "optimizer": {"learning_rate": 5e-3},
    "lr_schedule": {"warmup_steps": 4},
    "data": {"sources": ["text.txt"], "tokenizer": {"kind": "bytes"}},
    "run": {"num_steps": 40, "threads_per_rank": 1, "evaluate_batches": 4},
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(1)
    words = ["lantern", "river", "baker", "north", "counts", "mends", "the", "a", "slowly"]
    lines = [" ".join(draw.choice(words) for _ in range(12)) for _ in range(3000)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINY))
    return file
