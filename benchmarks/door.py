"""Measures the cost of the Python door: the same run by launch/train.py and by `parallel3d.train`, in turn.

    python benchmarks/door.py --text FILE [--turns 5] [--steps 300] [--same]

One process of a small model, so that a step is short and a cost beside it shows. The script of the door has a callback
that is called after each step, as people's own have. Printed are the median time of a step in metrics.jsonl, from step
10 on, the time of a whole run, from the command to its end, and the ratios of the turns. With --same both runs of a
turn are those of launch/train.py: how far their ratios are from 1 is the noise of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
FILE, DOOR, AGAIN = "launch/train.py", "parallel3d.train", "launch/train.py again"
FIRST_STEP = 10
SCRIPT = """
import sys
import parallel3d

class Watch(parallel3d.Callback):
    num_steps = 0
    def on_step(self, line):
        self.num_steps += 1

if __name__ == "__main__":
    parallel3d.train(sys.argv[1], callbacks=[Watch()])
"""
MODEL = dict(vocab_size=257, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="what the runs train on")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--same", action="store_true", help="launch/train.py against itself")
    options = parser.parse_args(arguments)
    if options.steps < FIRST_STEP:
        parser.error(f"--steps {options.steps}: must be at least {FIRST_STEP}, from which step on times count")
    other = AGAIN if options.same else DOOR
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run(FILE, work, "first", options)  # tokenises the text, and measures what products run by
        turns = []
        for number in range(options.turns):
            ways = (FILE, other) if number % 2 == 0 else (other, FILE)
            turns.append({way: run(way, work, f"{number}-{ways.index(way)}", options) for way in ways})
            for way in (FILE, other):
                step_s, whole_s = turns[-1][way]
                print(f"turn {number + 1}, {way}: {step_s * 1e3:.2f} ms a step, {whole_s:.2f} s in all", flush=True)
    for index, what in enumerate(("a step", "a run")):
        file_s, other_s = (median(times[way][index] for times in turns) for way in (FILE, other))
        ratios = sorted(times[other][index] / times[FILE][index] for times in turns)
        spread = f"[{ratios[0]:.3f} to {ratios[-1]:.3f}]"
        print(f"{what}: {FILE} {file_s:.4f} s, {other} {other_s:.4f} s, median ratio {median(ratios):.3f} {spread}")
    return 0


def run(way: str, work: Path, name: str, options: argparse.Namespace) -> tuple[float, float]:
    """Trains; returns the median seconds of a step, and those of the whole command."""
    config = {
        "model": MODEL,
        "batch": {"global_batch_size": 4, "micro_batch_size": 4, "sequence_length": 128},
        "data": {"sources": [str(options.text.resolve())], "tokenizer": {"kind": "bytes"}},
        "optimizer": {"learning_rate": 1e-3},
        "monitor": {"charts": False},
        "run": {"num_steps": options.steps, "threads_per_rank": 1, "directory": str(work / name)},
    }
    config["data"]["cache_directory"] = str(work / "cache")
    path, script = work / f"{name}.json", work / "script.py"
    path.write_text(json.dumps(config))
    script.write_text(SCRIPT)
    command = [str(ROOT / FILE), "--config", str(path)] if way != DOOR else [str(script), str(path)]
    begun = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *command], cwd=work, env=environment, check=True, stdout=subprocess.DEVNULL)
    whole_s = time.perf_counter() - begun
    lines = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    return median(line["step_s"] for line in lines if line.get("step_s") and line["step"] >= FIRST_STEP), whole_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
