"""Hashes the numbers of 12 short seeded runs: `python benchmarks/frozen_runs.py [--against FILE]`.

A refactoring must not change a single bit of training. Each run trains a small model for a few steps with
`precision.sums=exact`, so that its numbers do not depend on the layout or on timing, and is hashed three ways: training
and evaluation losses, all other metrics that are not timings, and the final weights in Hugging Face's format. Together
the runs cover layouts, schedules, families, number formats, a killed worker, a resume on another layout and warmups.

Hashes are comparable between two commits on one machine: matrix products of another CPU may differ in their last bits.
The script uses only the command line and the files of a run, so that it survives changes of the code under it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS = 8

METRICS = (
    "tokens",
    "tokens_read",
    "sequence_length",
    "num_sequences",
    "grad_norm",
    "lr",
    "num_updates",
    "perplexity",
    "loss_ratio",
    "fraction_clipped",
    "loss_scale",
    "param_norm",
    "variance_norm",
    "variance_max",
)
"""Metrics of a step that are functions of the mathematics alone. A renamed metric keeps its position."""

LLAMA = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.06,
    "initializer_depth_scaling": "num_layers",
}
GPT2 = {
    "architecture": "gpt2",
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_dropout": 0.1,
    "tie_word_embeddings": True,
}
KILLED = '[{"rank": 3, "step": 4, "phase": "backward"}, {"rank": 1, "step": 6, "phase": "all_reduce"}]'


@dataclass(frozen=True, kw_only=True)
class FrozenRun:
    """One run: its overrides, and those of a first part that it resumes from, if any."""

    name: str
    overrides: tuple[str, ...]
    model: dict[str, object] = field(default_factory=lambda: LLAMA)
    begins_with: tuple[str, ...] = ()


RUNS = (
    FrozenRun(name="one process", overrides=()),
    FrozenRun(name="pp2 dp2", overrides=("parallel.pp_size=2", "parallel.dp_size=2")),
    FrozenRun(
        name="tp2 dp2 sequence parallel",
        overrides=("parallel.tp_size=2", "parallel.dp_size=2", "parallel.sequence_parallel=true"),
    ),
    FrozenRun(
        name="tp2 pp2 gpipe zero0",
        overrides=(
            "parallel.tp_size=2",
            "parallel.pp_size=2",
            "parallel.schedule=gpipe",
            "parallel.zero_stage=0",
        ),
    ),
    FrozenRun(
        name="interleaved, full recompute",
        overrides=(
            "parallel.pp_size=2",
            "parallel.dp_size=2",
            "parallel.schedule=interleaved",
            "parallel.virtual_stages=2",
            "parallel.recompute=full",
        ),
    ),
    FrozenRun(
        name="gpt2 tied, zb-h1, dropout",
        model=GPT2,
        overrides=("parallel.pp_size=2", "parallel.dp_size=2", "parallel.schedule=zb-h1"),
    ),
    FrozenRun(
        name="bf16, selective recompute, document mask",
        overrides=(
            "precision.policy=bf16",
            "parallel.dp_size=2",
            "parallel.recompute=selective",
            "data.document_mask=true",
        ),
    ),
    FrozenRun(
        name="bf16_sr pp2 dp2",
        overrides=("precision.policy=bf16_sr", "parallel.pp_size=2", "parallel.dp_size=2"),
    ),
    FrozenRun(name="fp16 dp2", overrides=("precision.policy=fp16", "parallel.dp_size=2")),
    FrozenRun(
        name="pp2 dp3 with two killed workers",
        overrides=("parallel.pp_size=2", "parallel.dp_size=3", "elastic.max_rejoins=0", f"elastic.faults={KILLED}"),
    ),
    FrozenRun(
        name="saved on pp2 dp2, resumed on tp2",
        overrides=("parallel.tp_size=2", "parallel.dp_size=1"),
        begins_with=("parallel.pp_size=2", "parallel.dp_size=2", "run.num_steps=4"),
    ),
    FrozenRun(
        name="warmup of lengths and batches, pp2 dp2",
        overrides=(
            "parallel.pp_size=2",
            "parallel.dp_size=2",
            "warmup.sequence_length.kind=linear",
            "warmup.sequence_length.start=8",
            "warmup.sequence_length.duration=4",
            "warmup.sequence_length.multiple=8",
            "warmup.batch_size.start=4",
            "warmup.batch_size.duration=768",
            "warmup.batch_size.increment=4",
        ),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Hash the numbers of 12 short seeded runs.")
    parser.add_argument("--against", help="hashes that an earlier call has written: exit code 1 where they differ")
    parser.add_argument("--out", help="file to write the hashes to")
    parser.add_argument("--only", help="run only those whose name contains this")
    options = parser.parse_args()
    expected = json.loads(Path(options.against).read_text()) if options.against else {}
    hashes: dict[str, object] = {"cpu": cpu_name()}
    if expected and expected["cpu"] != hashes["cpu"]:
        print(f"the hashes in {options.against} are of {expected['cpu']}: last bits may differ here")
    num_changed = 0
    for run in RUNS:
        if options.only and options.only not in run.name:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            hashes[run.name] = found = hashes_of(run, Path(scratch))
        is_changed = bool(expected) and expected.get(run.name) != found
        num_changed += 1 if is_changed else 0
        print(f"{'CHANGED ' if is_changed else ''}{run.name}: {' '.join(f'{k} {v}' for k, v in found.items())}")
    if options.out:
        Path(options.out).write_text(json.dumps(hashes, indent=2) + "\n")
    if expected:
        print(f"{num_changed} runs have changed" if num_changed else "all hashes are equal")
    return 1 if num_changed else 0


def hashes_of(run: FrozenRun, scratch: Path) -> dict[str, str]:
    """Trains in an empty folder and hashes what is there afterwards."""
    folder = scratch / "run"
    if run.begins_with:
        train(run, scratch, folder, run.begins_with)
    train(run, scratch, folder, (*run.overrides, "run.resume=auto"))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "event" not in record]
    evaluations = [record["loss"] for record in records if record.get("event") == "evaluation"]
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1)), f"{run.name}: steps are missing"
    return {
        "losses": hash_of([step["loss"] for step in steps], evaluations),
        "metrics": hash_of([[step.get(name) for name in METRICS] for step in steps]),
        "weights": hash_of_weights(folder, scratch / "hf"),
    }


def train(run: FrozenRun, scratch: Path, folder: Path, overrides: tuple[str, ...]) -> None:
    config = {
        "model": run.model,
        "batch": {"global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 32},
        "precision": {"sums": "exact"},
        "optimizer": {"learning_rate": 5e-3},
        "data": {
            "sources": [str(write_text(scratch / "text.txt"))],
            "tokenizer": {"kind": "bytes"},
            "cache_directory": str(scratch / "cache"),
        },
        "checkpoint": {"every": 4},
        "run": {
            "num_steps": NUM_STEPS,
            "evaluate_every": 4,
            "evaluate_batches": 1,
            "directory": str(folder),
            "threads_per_rank": 1,
            "device": "cpu",
        },
    }
    path = scratch / "config.json"
    path.write_text(json.dumps(config))
    call("launch/train.py", "--config", str(path), *overrides)


def call(script: str, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}\nexit code {done.returncode}")


def write_text(path: Path) -> Path:
    """About 60 kB of made words in lines, always the same."""
    generator = random.Random(3)
    words = ["".join(generator.choices("abcdefghijklmnopqrst", k=generator.randint(1, 8))) for _ in range(200)]
    path.write_text("".join(" ".join(generator.choices(words, k=8)) + "\n" for _ in range(1500)))
    return path


def hash_of_weights(folder: Path, exported: Path) -> str:
    call("launch/convert.py", "to-hf", str(folder), str(exported))
    digest = hashlib.sha256()
    for path in sorted(exported.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    shutil.rmtree(exported)
    return digest.hexdigest()[:16]


def hash_of(*values: object) -> str:
    """A hash of numbers by all of their digits: repr of a float is exact."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0].split(":")[1].strip() if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
