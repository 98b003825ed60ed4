"""The examples for `parallel3d.train`, run as scripts in small sizes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.monitor.run_folder import METRICS, iterate_metrics
from tests.data.test_conversations import LLAMA3
from tests.support.hf_tokenizers import write_folder

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.full]


def run(name: str, *arguments: object, folder: Path) -> str:
    """The output of a script that runs in `folder`."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_model_of_ones_own(tmp_path: Path, text: Path) -> None:
    small = ["run.num_steps=8", "batch.sequence_length=32", f'data.sources=["{text}"]', "model.vocab_size=512"]
    cache = f"data.cache_directory={tmp_path}"
    losses = run("own_model.py", *small, cache, folder=tmp_path).splitlines()[-1]
    before, after = (float(losses.split()[index]) for index in (1, 3))
    assert losses.endswith("in 8 steps") and after < before


CHAT = [
    {"role": "user", "content": "def f(x)?"},
    {"role": "assistant", "content": "return x + 1"},
    {"role": "user", "content": "the cat's mat; 漢字"},
    {"role": "assistant", "content": "Größe"},
]


def loss_of_replies(folder: Path) -> tuple[float, int]:
    """transformers' loss of the chat with all but the replies ignored, and the number of tokens that count."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(num_messages: int, is_reply_next: bool) -> list[int]:
        text = tokenizer.apply_chat_template(CHAT[:num_messages], add_generation_prompt=is_reply_next, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = [*encode(4, False), tokenizer.eos_token_id]
    labels = [-100] * len(ids)
    for number, end in ((1, len(encode(2, False))), (3, len(ids))):
        begin = len(encode(number, True))
        labels[begin:end] = ids[begin:end]
    model = AutoModelForCausalLM.from_pretrained(folder)
    loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
    return loss.item(), sum(label >= 0 for label in labels)


def test_fine_tuning_a_folder_on_chats(tmp_path: Path) -> None:
    """Every chat is the same here, so the first loss is that of one, and prompts have no part in it. fp32: 1e-4."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    settings = {"chat_template": LLAMA3, "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    folder = write_folder(tmp_path / "small", kind="llama3", settings=settings)
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256, initializer_range=0.2)).save_pretrained(folder)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(f"{json.dumps({'messages': CHAT})}\n" * 40)
    small = [
        "run.num_steps=4",
        f"data.cache_directory={tmp_path}",
        "precision.policy=fp32",
        "batch.sequence_length=256",
    ]
    assert "tokens of replies" in run("fine_tune_folder.py", folder, chats, *small, folder=tmp_path)

    first = next(line for line in iterate_metrics(tmp_path / "runs" / "small" / METRICS) if line.get("step") == 1)
    loss, num_targets = loss_of_replies(folder)
    assert first["loss"] == pytest.approx(loss, rel=1e-4)
    assert first["num_loss_tokens"] % num_targets == 0 and first["num_loss_tokens"] >= 8 * num_targets
    tuned, before = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "small-tuned", folder))
    assert not tuned.lm_head.weight.equal(before.lm_head.weight)


def test_fine_tuning_stops_when_it_overfits(tmp_path: Path) -> None:
    """Replies of random letters can be learned by heart only: the validation loss rises soon, and what is exported
    are the weights of the lowest one, not the last."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    settings = {"chat_template": LLAMA3, "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    folder = write_folder(tmp_path / "small", kind="llama3", settings=settings)
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256, initializer_range=0.2)).save_pretrained(folder)
    letters, chats = random.Random(5), tmp_path / "chats.jsonl"
    replies = ["".join(letters.choices("abcdefgh ", k=60)) for _ in range(40)]
    lines = [json.dumps({"messages": [CHAT[0], {"role": "assistant", "content": reply}]}) for reply in replies]
    chats.write_text("\n".join(lines) + "\n")
    small = ["run.num_steps=400", "optimizer.learning_rate=0.03", "run.evaluate_batches=1", "precision.policy=fp32"]
    small += [f"data.cache_directory={tmp_path}", "batch.sequence_length=256", "monitor.charts=false"]
    run("fine_tune_folder.py", folder, chats, *small, folder=tmp_path)

    lines_of_run = list(iterate_metrics(tmp_path / "runs" / "small" / METRICS))
    losses = {line["step"]: line["loss"] for line in lines_of_run if line.get("event") == "evaluation"}
    best = min(losses, key=lambda step: losses[step])
    assert list(losses)[-3:] == [best, best + 10, best + 20], losses
    assert lines_of_run[-1].get("step", 0) < 400
    checkpoints = CheckpointDirectory(tmp_path / "runs" / "small" / "checkpoints")
    assert checkpoints.steps()[-1] >= best + 20
    for step, is_equal in ((best, True), (checkpoints.steps()[-1], False)):
        command = [sys.executable, "-m", "parallel3d", "convert", "to-hf", str(checkpoints.path_of(step))]
        subprocess.run([*command, str(tmp_path / f"of-{step}")], cwd=EXAMPLES.parent, check=True, capture_output=True)
        tuned, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("small-tuned", f"of-{step}"))
        assert tuned.lm_head.weight.equal(other.lm_head.weight) == is_equal


def test_in_a_notebook(tmp_path: Path) -> None:
    """The cells one after another in one process that holds torch and threads; its corpus is small here."""
    code = (EXAMPLES / "notebook_run.py").read_text().replace('"num_steps": 60', '"num_steps": 20')
    (tmp_path / "cells.py").write_text(f"import torch\ntorch.ones(9, 9) @ torch.ones(9, 9)\n{code}")
    script = tmp_path / "cells.py"
    out = run(str(script), folder=tmp_path)
    assert "step 20: " in out and "evaluation at step 20" in out and "20 steps, loss 5." in out
