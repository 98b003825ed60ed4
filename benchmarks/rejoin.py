"""Measures how long a run pauses when a lost worker returns, and what workers that come and go cost it.

    python benchmarks/rejoin.py [--rounds 10] [--only quickstart] [--ranks 4 10] [--steps 300] [--cycles 5] [--pairs 3]
    python benchmarks/rejoin.py --restarts 5 --only quickstart --ranks 4  # joins beside restarts from a checkpoint

Pauses: in one run after the other a worker is killed `--rounds` times, each time after the one before has come back.
The figures are those of the run's own records. Throughput (with `--steps`): the quickstart trains that many steps
undisturbed, and again while a worker is killed and returns `--cycles` times; both from the first step to the last, in
`--pairs` of runs in turn, every second one the other way round. If a machine drifts by more than losses cost, the other
figure counts: what the steps from each kill to the return have taken beyond as many before and after them in the same
run.

Beside restarts (with `--restarts`, in place of both): the same workers are killed in the run that heals, and in one
with `elastic.enabled` false, which every loss restarts from the newest checkpoint (`--every` steps). Seconds are those
from the signal to the end of the first step that had not been done before, by the records of steps.
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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.recovery import MODELS

PARTS = ("agree_s", "repair_s", "regroup_s")
WAIT_S = 600.0
EVERY_STEPS = 10
CALM_STEPS = 3
"""Between a join and the next kill."""
WINDOW_STEPS = 12
"""Around a kill: calm steps before it, steps that it may slow down, and calm ones after those, of each this number."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The costs of one killed worker."""

    back_s: float
    """From the signal to the end of the first step that had not been done before."""
    num_repeated: int
    """Completed steps that are done again."""


class Run:
    """A training run in which workers are killed."""

    def __init__(self, folder: str, overrides: Sequence[str]):
        self.folder = Path(folder, "run")
        self._output = Path(folder, "output.txt")
        self._lines: list[dict[str, Any]] = []
        self._num_read = 0
        command = [sys.executable, "launch/train.py", "--config", "configs/quickstart.json"]
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(
                [*command, f"run.directory={self.folder}", "elastic.max_rejoins=1000", *overrides],
                cwd=ROOT,
                stdout=output,
                stderr=output,
            )

    def lines(self) -> list[dict[str, Any]]:
        """All records so far; only new ones are read, since reading takes time from the run."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self._num_read)
                new, _, _ = file.read().rpartition(b"\n")
            self._num_read += len(new) + bool(new)
            self._lines += [json.loads(line) for line in new.splitlines()]
        return self._lines

    def num_steps(self) -> int:
        return sum("event" not in line for line in self.lines())

    def changes(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("event") == "membership"]

    def await_steps(self, num_steps: int) -> float:
        """Returns the time at which the run had made this number of steps."""
        self._wait(lambda: self.num_steps() >= num_steps, f"step {num_steps}")
        return time.monotonic()

    def strike(self, rank: int) -> list[int]:
        """Kills a worker, waits until another one has its place, and for some steps; returns those that have joined."""
        num_changes = len(self.changes())
        self.kill(rank)
        self.await_join(num_changes)
        self.await_steps(self.num_steps() + CALM_STEPS)
        return [each["rank"] for change in self.changes()[num_changes:] for each in change["joined"]]

    def kill(self, rank: int) -> float:
        """Returns the time of the signal."""
        log = (self.folder / "logs" / f"rank-{rank}.log").read_text()
        killed_s = time.time()
        os.kill(int(re.findall(r"is process (\d+)", log)[-1]), signal.SIGKILL)
        return killed_s

    def await_join(self, num_changes: int) -> None:
        """Waits until a worker has joined in one of the changes after the first `num_changes`."""
        self._wait(lambda: any(change["joined"] for change in self.changes()[num_changes:]), "a worker that returns")

    def lose(self, rank: int) -> Loss:
        """Kills a worker, and waits until the run has done a step that had not been done before."""
        num_before = len(events_of_losses(self.lines()))
        killed_s = self.kill(rank)
        self._wait(lambda: len(events_of_losses(self.lines())) > num_before, f"the loss of {rank}")
        num_done, num_repeated = account(self.lines(), num_before)
        self._wait(lambda: newest_step(self.lines()) > num_done, f"a step after {num_done}")
        return Loss(back_s=time.time() - killed_s, num_repeated=num_repeated)

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
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=sorted(MODELS), help="one size of model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 10])
    parser.add_argument("--steps", type=int, help="measure throughput, too")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3, help="of an undisturbed run and one with kills")
    parser.add_argument("--restarts", type=int, help="compare N returns with N restarts, nothing else")
    parser.add_argument("--every", type=int, default=EVERY_STEPS, help=f"steps between checkpoints ({EVERY_STEPS})")
    options = parser.parse_args()
    if options.restarts:
        compare_with_restarts(options)
        return
    print("| model | agreed | repaired | regrouped | pause: median | worst | MiB moved |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in [options.only] if options.only else MODELS:
        for num_ranks in options.ranks:
            joins = measure_pauses(MODELS[name], num_ranks, options.rounds)
            print(pause_row(f"{name}, {num_ranks} ranks", joins), flush=True)
    if options.steps:
        compare_speed(options.steps, options.cycles, options.pairs)


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


def compare_speed(num_steps: int, num_cycles: int, num_pairs: int) -> None:
    """Prints the throughput with kills and returns, of that without, in each pair of runs; and the medians."""
    ratios, by_steps = [], []
    for number in range(num_pairs):
        order = (0, num_cycles) if number % 2 == 0 else (num_cycles, 0)
        measured = {cycles: measure_speed(num_steps, cycles) for cycles in order}
        (calm, _), (struck, cost_s) = measured[0], measured[num_cycles]
        ratios.append(calm / struck)
        by_steps.append(1 - sum(cost_s) / struck)
        each_s = ", ".join(f"{seconds:.2f}" for seconds in cost_s)
        print(
            f"{num_steps} steps: {calm:.1f} s undisturbed, {struck:.1f} s with {num_cycles} workers killed: "
            f"{ratios[-1]:.3f}; by the steps around each kill, which cost {each_s} s: {by_steps[-1]:.3f}",
            flush=True,
        )
    print(f"throughput of undisturbed, medians: {statistics.median(ratios):.3f}; {statistics.median(by_steps):.3f}")


def compare_with_restarts(options: argparse.Namespace) -> None:
    seconds = "s to the next new step: median | worst"
    print(f"| model | a loss is followed by | {seconds} | steps repeated | join's pause: median | worst |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name in [options.only] if options.only else MODELS:
        for num_ranks in options.ranks:
            for heals in (True, False):
                losses, joins = measure_losses(MODELS[name], num_ranks, options.restarts, options.every, heals=heals)
                print(loss_row(f"{name}, {num_ranks} ranks", losses, joins), flush=True)


def measure_losses(
    model: Sequence[str], num_ranks: int, num_rounds: int, every: int, *, heals: bool
) -> tuple[list[Loss], list[float]]:
    """Returns what each loss of one run costs, and the pauses of the joins that follow them."""
    flags = ("run.num_steps=1000000", "run.evaluate_every=null", "monitor.charts=false", f"checkpoint.every={every}")
    restarting = () if heals else ("elastic.enabled=false", "restart.max_restarts=1000")
    losses, ranks = [], list(range(num_ranks))
    draw = random.Random(0)
    with TemporaryDirectory() as folder:
        run = Run(folder, (*model, f"parallel.dp_size={num_ranks // 2}", *flags, *restarting))
        try:
            for number in range(num_rounds):
                run.await_steps(max(every + 5, newest_step(run.lines()) + every + 2 * number))  # anywhere between saves
                victim = draw.choice(ranks)
                num_changes = len(run.changes())
                losses.append(run.lose(victim))
                if heals:
                    run.await_join(num_changes)
                    new = [each["rank"] for change in run.changes()[num_changes:] for each in change["joined"]]
                    ranks = [rank for rank in ranks if rank != victim] + new
        finally:
            run.end()
        joins = [change for change in run.changes() if change["joined"]]
        return losses, [sum(join[part] for part in PARTS) for join in joins]


def events_of_losses(lines: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the indices of the records of losses and restarts."""
    return [
        index
        for index, line in enumerate(lines)
        if line.get("event") == "restart" or (line.get("event") == "membership" and line["who"])
    ]


def account(lines: Sequence[dict[str, Any]], number: int) -> tuple[int, int]:
    """Returns up to which step a run had come before its loss of this number, and how many steps it does again."""
    index = events_of_losses(lines)[number]
    if lines[index]["event"] == "membership":
        return newest_step(lines[:index]), 0
    lost = lines[index]["lost_steps"]
    return lines[index]["step"] + lost, lost


def newest_step(lines: Sequence[dict[str, Any]]) -> int:
    return max((line["step"] for line in lines if "event" not in line), default=0)


def loss_row(name: str, losses: Sequence[Loss], joins: Sequence[float]) -> str:
    seconds = [loss.back_s for loss in losses]
    repeated = statistics.median(loss.num_repeated for loss in losses)
    pauses = f"{statistics.median(joins):.3f} | {max(joins):.3f}" if joins else "- | -"
    way = "a join" if joins else "a restart"
    return f"| {name} | {way} | {statistics.median(seconds):.3f} | {max(seconds):.3f} | {repeated:g} | {pauses} |"


def pause_row(name: str, joins: Sequence[dict[str, Any]]) -> str:
    parts = [statistics.median(join[part] for join in joins) for part in PARTS]
    pauses = [sum(join[part] for part in PARTS) for join in joins]
    moved_mib = statistics.median(join["moved_bytes"] for join in joins) / 2**20
    seconds = " | ".join(f"{part:.3f}" for part in (*parts, statistics.median(pauses), max(pauses)))
    return f"| {name} | {seconds} | {moved_mib:.1f} |"


def measure_speed(num_steps: int, num_cycles: int) -> tuple[float, list[float]]:
    """Returns the seconds from the first step of the quickstart to its last one, and those that each kill has cost."""
    cost_s: list[float] = []
    with TemporaryDirectory() as folder:
        run = Run(folder, (f"run.num_steps={num_steps}", "run.evaluate_every=null", "monitor.charts=false"))
        ranks = [0, 1, 2, 3]
        try:
            begun_s = run.await_steps(1)
            for cycle in range(num_cycles):
                kill_at = (cycle + 1) * num_steps // (num_cycles + 1)
                before_s = run.await_steps(kill_at - WINDOW_STEPS)
                killed_s, num_changes = run.await_steps(kill_at), len(run.changes())
                run.kill(ranks[0])
                back_s = run.await_steps(kill_at + WINDOW_STEPS)
                changes = run.changes()[num_changes:]
                ranks = [*ranks[1:], *(each["rank"] for change in changes for each in change["joined"])]
                if len(ranks) < 4:
                    raise SystemExit(f"no worker came back within {WINDOW_STEPS} steps")
                calm_s = (killed_s - before_s + run.await_steps(kill_at + 2 * WINDOW_STEPS) - back_s) / 2
                cost_s.append(back_s - killed_s - calm_s)
            return run.await_steps(num_steps) - begun_s, cost_s
        finally:
            run.end()


if __name__ == "__main__":
    main()
