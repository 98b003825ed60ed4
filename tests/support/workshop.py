"""A folder with what commands of the pages use: a short run, a Hugging Face folder, texts, a configuration."""

from __future__ import annotations

import json
import shutil
from functools import reduce
from pathlib import Path

from parallel3d.commands.convert import main as convert

ROOT = Path(__file__).parents[2]
WORDS = ("the", "queen", "said", "that", "a", "pipeline", "has", "stages", "and", "every", "stage", "holds", "layers")
COPIES = ("A", "B", "NAME", "a", "b", "other", "here", "there", "on1", "on2")
SEEDS = {"a1": 1, "a2": 2, "b1": 1, "b2": 2}
"""Runs whose configuration says another seed, for comparisons seed by seed."""
CONFIG = {
    "model": {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    },
    "parallel": {"pp_size": 2, "dp_size": 2},
    "batch": {"global_batch_size": 16, "micro_batch_size": 2, "sequence_length": 32},
    "optimizer": {"learning_rate": 1e-3},
    "data": {"sources": ["my_text.txt"]},
    "run": {"num_steps": 2000},
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def sentences(num: int, start: int = 0) -> str:
    """Lines of twelve words, all different."""
    lines = (
        " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 12)) + f" {number}"
        for number in range(start, start + num)
    )
    return "\n".join(lines) + "\n"


def write_texts(folder: Path) -> None:
    """Texts, prompts, conversations and a configuration with the names that pages use."""
    (folder / "my_text.txt").write_text(sentences(2000))
    for number, name in enumerate(("test.py", "test.txt", "wiki.test.txt")):
        (folder / name).write_text(sentences(20, start=5000 + 100 * number))
    write_lines(folder / "passages.jsonl", [{"text": line} for line in sentences(4).splitlines()])
    write_lines(folder / "questions.jsonl", [{"prompt": "The queen"}, {"prompt": "A pipeline has"}])
    chat = [{"role": "user", "content": "stages?"}, {"role": "assistant", "content": "some layers"}]
    write_lines(folder / "chats.jsonl", [{"messages": chat}] * 40)
    (folder / "FILE").write_text(json.dumps(CONFIG))
    (folder / "configs").symlink_to(ROOT / "configs")


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def add_trained(folder: Path) -> None:
    """Further names for the run in runs/quickstart, and its export `my_llama`."""
    runs = folder / "runs"
    for name in (*COPIES, *SEEDS):
        shutil.copytree(runs / "quickstart", runs / name, symlinks=True)
    for name, seed in SEEDS.items():
        set_field(runs / name / "config.json", "run.seed", seed)
    set_field(runs / "on2" / "config.json", "parallel.dp_size", 8)  # a run of two hosts of 8
    shutil.copytree(runs / "quickstart", folder / "RUN", symlinks=True)
    assert convert(["to-hf", str(runs / "quickstart"), str(folder / "my_llama")]) == 0
    set_field(folder / "my_llama" / "config.json", "max_position_embeddings", 1024)
    (folder / "my_llama" / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def set_field(path: Path, name: str, value: int) -> None:
    """Changes a field of a file of JSON."""
    content = json.loads(path.read_text())
    *sections, field = name.split(".")
    reduce(dict.__getitem__, sections, content)[field] = value
    path.write_text(json.dumps(content))
