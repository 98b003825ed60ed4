"""Measures how long a run pauses when a lost worker returns, and what workers that come and go cost it.

    python benchmarks/rejoin.py [--rounds 10] [--only quickstart] [--ranks 4 10] [--steps 300] [--cycles 5]

Pauses: in one run after the other a worker is killed `--rounds` times, each time after the one before has come back.
The figures are those of the run's own records. Throughput (with `--steps`): the quickstart trains that many steps
undisturbed, and again while a worker is killed and returns `--cycles` times; both from the first step to the last.
Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.recovery import MODELS

PARTS = ("agree_s", "repair_s", "regroup_s")
WAIT_S = 120.0
CALM_STEPS = 3
"""Between a join and the next kill."""


class Run:
    """A training run in which workers are killed."""

    def __init__(self, folder: str, overrides: Sequence[str]):
        self.folder = Path(folder, "run")
        self._output = Path(folder, "output.txt")
        command = [sys.executable, "launch/train.py", "--config", "configs/quickstart.json"]
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(
                [*command, f"run.directory={self.folder}", "elastic.max_rejoins=1000", *overrides],
                cwd=ROOT,
                stdout=output,
                stderr=output,
            )

    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def num_steps(self) -> int:
        return sum("event" not in line for line in self.lines())

    def changes(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("event") == "membership"]

    def await_steps(self, num_steps: int) -> None:
        self._wait(lambda: self.num_steps() >= num_steps, f"step {num_steps}")

    def strike(self, rank: int) -> list[int]:
        """Kills a worker, waits until another one has its place, and for some steps; returns those that have joined."""
        num_changes = len(self.changes())
        log = (self.folder / "logs" / f"rank-{rank}.log").read_text()
        os.kill(int(re.findall(r"is process (\d+)", log)[0]), signal.SIGKILL)
        self._wait(lambda: any(change["joined"] for change in self.changes()[num_changes:]), f"another for {rank}")
        self.await_steps(self.num_steps() + CALM_STEPS)
        return [each["rank"] for change in self.changes()[num_changes:] for each in change["joined"]]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(WAIT_S)

    def _wait(self, is_done: Any, what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not is_done():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.process.kill()
                raise SystemExit(f"waited in vain for {what}:\n{self._output.read_text()[-4000:]}")
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=sorted(MODELS), help="one size of model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 10])
    parser.add_argument("--steps", type=int, help="measure throughput, too")
    parser.add_argument("--cycles", type=int, default=5)
    options = parser.parse_args()
    print("| model | agreed | repaired | regrouped | pause: median | worst | MiB moved |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in [options.only] if options.only else MODELS:
        for num_ranks in options.ranks:
            joins = measure_pauses(MODELS[name], num_ranks, options.rounds)
            print(pause_row(f"{name}, {num_ranks} ranks", joins), flush=True)
    if options.steps:
        calm, struck = (measure_speed(options.steps, cycles) for cycles in (0, options.cycles))
        print(f"{options.steps} steps: {calm:.1f} s undisturbed, {struck:.1f} s with {options.cycles} workers killed")
        print(f"throughput {calm / struck:.3f} of undisturbed")


def measure_pauses(model: Sequence[str], num_ranks: int, num_rounds: int) -> list[dict[str, Any]]:
    """Returns the records of the joins of one run."""
    draw, ranks = random.Random(0), list(range(num_ranks))
    with TemporaryDirectory() as folder:
        flags = ("run.num_steps=1000000", "run.evaluate_every=null", "monitor.charts=false")
        run = Run(folder, (*model, f"parallel.dp_size={num_ranks // 2}", *flags))
        try:
            run.await_steps(5)
            for _ in range(num_rounds):
                victim = draw.choice(ranks)
                ranks = [rank for rank in ranks if rank != victim] + run.strike(victim)
        finally:
            run.end()
        return [change for change in run.changes() if change["joined"]]


def pause_row(name: str, joins: Sequence[dict[str, Any]]) -> str:
    parts = [statistics.median(join[part] for join in joins) for part in PARTS]
    pauses = [sum(join[part] for part in PARTS) for join in joins]
    moved_mib = statistics.median(join["moved_bytes"] for join in joins) / 2**20
    seconds = " | ".join(f"{part:.3f}" for part in (*parts, statistics.median(pauses), max(pauses)))
    return f"| {name} | {seconds} | {moved_mib:.1f} |"


def measure_speed(num_steps: int, num_cycles: int) -> float:
    """Returns the seconds from the first step of the quickstart to its last one."""
    with TemporaryDirectory() as folder:
        run = Run(folder, (f"run.num_steps={num_steps}", "run.evaluate_every=null", "monitor.charts=false"))
        ranks = [0, 1, 2, 3]
        try:
            run.await_steps(1)
            begun_s = time.monotonic()
            for cycle in range(num_cycles):
                run.await_steps((cycle + 1) * num_steps // (num_cycles + 1))
                ranks = [*ranks[1:], *run.strike(ranks[0])]
            run.await_steps(num_steps)
            return time.monotonic() - begun_s
        finally:
            run.end()


if __name__ == "__main__":
    main()
