"""Fine-tuning on conversations as it is judged: of the documents 85 % to train on, 5 % to stop by, 10 % for the end."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from parallel3d.__main__ import main

NUM_CHATS = 60
NUM_TEST_TOKENS = 6 * (12 + len("<|im_end|>\n") + 1)
"""Of 6 replies: 12 letters, the end of a message and EOS."""


def write_chats(path: Path) -> Path:
    """Replies that follow from nothing: what is learned beyond their letters is learned by heart."""
    generator = random.Random(5)
    with path.open("w") as file:
        for number in range(NUM_CHATS):
            reply = "".join(generator.choices("abcdefgh", k=12))
            turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": reply}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.mark.full
@pytest.mark.slow
def test_it_stops_when_it_only_learns_by_heart_and_the_best_is_judged_on_the_test(
    tiny: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    split = {"chat": {}, "document_mask": True, "validation_fraction": 0.05, "test_fraction": 0.1}
    tiny["data"] |= {"sources": [write_chats(tmp_path / "chats.jsonl")], "cache_directory": tmp_path / "cache", **split}
    tiny["batch"] |= {"global_batch_size": 12, "micro_batch_size": 12, "sequence_length": 128}
    tiny["model"] |= {"hidden_size": 64, "intermediate_size": 128}
    tiny["optimizer"] |= {"learning_rate": 3e-3}  # at 0.01 it learned nothing by heart, and noise decided
    tiny["run"] |= {"num_steps": 1000, "evaluate_every": 25}
    tiny["checkpoint"] = {"every": 25, "keep_last": 40}
    result = parallel3d.train(tiny, callbacks=[parallel3d.EarlyStopping(patience=4)])
    assert result.best_checkpoint is not None and result.final_step < 1000
    losses = {line["step"]: line["loss"] for line in result.events if line["event"] == "evaluation"}
    saved = {int(path.name.removeprefix("step-")): path for path in result.checkpoints}
    # a save is left out while the one before it is under way
    best = min(losses.keys() & saved.keys(), key=lambda step: losses[step])
    assert result.best_checkpoint == saved[best].resolve() and best < max(losses)

    capsys.readouterr()
    found = {}
    for step in (best, max(saved)):
        out = tmp_path / f"{step}.json"
        assert main(["evaluate", str(saved[step]), "--slice", "test", "--out", str(out)]) == 0, capsys.readouterr()
        found[step] = json.loads(out.read_text())["results"]["held-out text"]
    assert found[best]["loss"] < found[max(saved)]["loss"], found
    assert found[best]["tokens"] == found[max(saved)]["tokens"] == NUM_TEST_TOKENS
