"""How long an elastic loop stands still when one of its workers is killed.

    python benchmarks/drop_in_recovery.py --losses 10

Four workers train the network of examples/digits.py with elastic.steps. Every 20 steps, if all four are there, one of
them, each in turn, sends itself SIGKILL as it begins to compute; it is started again and returns. The workers note on
the machine's clock when the signal is sent, when another worker begins to compute the lost samples, and when the last
one has completed that same step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from parallel3d import elastic

NUM_WORKERS, EVERY, END_EVERY = 4, 20, 100


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--directory", default=tempfile.mkdtemp(prefix="drop-in-"))
    return parser.parse_args()


OPTIONS = parse_arguments()
sys.argv[1:] = [f"--{name}={value}" for name, value in vars(OPTIONS).items()]  # the workers read the same folder
elastic.init(NUM_WORKERS, directory=OPTIONS.directory, max_rejoins=OPTIONS.losses)

import digits
import torch
from torch.nn import functional

from parallel3d.elastic.drop_in.elastic_loop import current_session

DIRECTORY = Path(OPTIONS.directory)


class Notes:
    """What this worker notes, a line each."""

    def __init__(self, rank: int):
        self._file = (DIRECTORY / f"times-{rank}.jsonl").open("a", buffering=1)

    def add(self, what: str, step: int, **more: Any) -> None:
        self._file.write(json.dumps({"what": what, "step": step, "at_s": time.monotonic(), **more}) + "\n")

    @staticmethod
    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for each in DIRECTORY.glob("times-*.jsonl") for line in each.read_text().splitlines()]


def main() -> None:
    session = current_session()
    notes = Notes(session.rank)
    training, _ = digits.make_data()
    network = digits.make_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    model = elastic.DataParallel(network, optimizer, sums="exact")
    sampler = elastic.Sampler(training, slot_size=64, batch_size=64 * NUM_WORKERS)
    for step in elastic.steps(sampler, epochs=10**6):
        if step.number % END_EVERY == 0 and num_killed() == OPTIONS.losses:
            break
        number = step.number
        for x, y in step:
            kill_if_due(number, notes)
            notes.add("slot", number, is_again=len(session.generations.workers) < NUM_WORKERS)
            functional.cross_entropy(model(x), y).backward()
        notes.add("done", number)
        optimizer.step()
    if session.generations.is_leader:
        report(Notes.read())


def num_killed() -> int:
    return len(list(DIRECTORY.glob("killed-*")))


def kill_if_due(step: int, notes: Notes) -> None:
    session = current_session()
    workers, count = session.generations.workers, num_killed()
    if step % EVERY or step % END_EVERY == 0 or len(workers) < NUM_WORKERS or count == OPTIONS.losses:
        return
    if (DIRECTORY / f"killed-{step}").exists() or session.rank != workers[step // EVERY % NUM_WORKERS]:
        return
    (DIRECTORY / f"killed-{step}").touch()
    notes.add("killed", step)
    os.kill(os.getpid(), signal.SIGKILL)


def report(notes: list[dict[str, Any]]) -> None:
    """Prints the times of all losses, and that of a step without one."""
    killed = {note["step"]: note["at_s"] for note in notes if note["what"] == "killed"}
    again, whole = [], []
    for step, at_s in killed.items():
        here = [note for note in notes if note["step"] == step]
        again.append(min(note["at_s"] for note in here if note["what"] == "slot" and note["is_again"]) - at_s)
        whole.append(max(note["at_s"] for note in here if note["what"] == "done") - at_s)
    done = {note["step"]: note["at_s"] for note in sorted(notes, key=lambda note: note["at_s"])}
    calm = [done[step] - done[step - 1] for step in done if step - 1 in done and not {step, step - 1} & set(killed)]
    lines = [json.loads(line) for line in (DIRECTORY / "metrics.jsonl").read_text().splitlines()]
    noticed = [line["detect_s"] for line in lines if line.get("event") == "membership" and not line["joined"]]
    for name, seconds in (
        ("noticed, by the run's record", noticed),
        ("the lost samples are computed again", again),
        ("the step is complete on all", whole),
        ("a step without a loss", calm),
    ):
        middle, worst = statistics.median(seconds), max(seconds)
        print(f"{name:36} median {middle:.3f} s, worst {worst:.3f} s, of {len(seconds)}")


main()
