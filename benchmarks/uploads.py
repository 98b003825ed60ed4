"""Measures what `checkpoint.upload` costs a run: `python benchmarks/uploads.py [--rounds 2] [--steps 60]`

One process trains a model of 29M parameters and saves four times, in turn without and with an upload to a folder
(file://). Prints the seconds of a step, mean and median, of each run, how long each upload took, and the ratios.
Nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIELDS = [
    "model.hidden_size=512",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=8",
    "model.intermediate_size=1376",
    "model.num_hidden_layers=8",
    "parallel.pp_size=1",
    "parallel.dp_size=1",
    "batch.global_batch_size=4",
    "batch.micro_batch_size=2",
    "batch.sequence_length=256",
    "monitor.charts=false",
    "run.evaluate_every=null",
]
WARMUP_STEPS = 5


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Measure what checkpoint.upload costs a run.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--directory", help="a disk with room for some checkpoints of 350 MB")
    options = parser.parse_args(arguments)
    steps: dict[bool, list[float]] = {False: [], True: []}
    print("| upload | mean step | median | uploads, seconds each |\n|---|---|---|---|")
    for number in range(2 * options.rounds):
        uploads = number % 2 == 1
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            found, times = train(Path(folder), options.steps, uploads)
        steps[uploads] += found
        listed = ", ".join(f"{seconds:.1f}" for seconds in times)
        print(f"| {uploads} | {mean(found):.3f} s | {median(found):.3f} s | {listed} |", flush=True)
    ratios = [of(steps[True]) / of(steps[False]) for of in (mean, median)]
    print(f"with / without: mean {ratios[0]:.3f}, median {ratios[1]:.3f}")


def train(folder: Path, num_steps: int, uploads: bool) -> tuple[list[float], list[float]]:
    """The seconds of the steps, and of the uploads from their begin to their end."""
    overrides = [*FIELDS, f"run.num_steps={num_steps}", f"run.directory={folder / 'run'}"]
    overrides += [f"checkpoint.every={num_steps // 4}"] + [f"checkpoint.upload=file://{folder}/store"] * uploads
    command = [sys.executable, "launch/train.py", "--config", "configs/quickstart.json", *overrides]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    lines = read(folder / "run" / "metrics.jsonl")
    steps = [line["step_s"] for line in lines if "event" not in line and line["step"] > WARMUP_STEPS]
    began: dict[str, float] = {}
    times = []
    for event in read(folder / "run" / "uploads.jsonl") if uploads else []:
        if event["event"] == "uploading":
            began[event["name"]] = event["time"]
        elif event["event"] == "uploaded":
            times.append(event["time"] - began[event["name"]])
    return steps, times


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main(sys.argv[1:])
