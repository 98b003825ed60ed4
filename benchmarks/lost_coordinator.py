"""Measures how long a run waits for another coordinator when its own is killed, without a launcher.

`python benchmarks/lost_coordinator.py [--kills 40] [--replicas 2]` trains the quickstart with a small batch and kills
the coordinator again and again, each time a moment (up to half a second, by a fixed seed) after the change before. It
prints the time from the signal to the line of that change in metrics.jsonl, which is written after the first step of
the new generation. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
LONGEST_WAIT_S = 120.0
CHANGE = '"event": "membership"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="lost-coordinator-") as folder:
        seconds = measure(Path(folder), options.kills, options.replicas)
    second = sum(each >= 1 for each in seconds)
    print(f"{2 * options.replicas} ranks, {len(seconds)} coordinators killed: from the signal to the change")
    print(f"median {statistics.median(seconds):.3f} s, worst {max(seconds):.3f} s; {second} of them a second or longer")


def measure(folder: Path, num_kills: int, replicas: int) -> list[float]:
    """Returns the seconds of each change."""
    command = [sys.executable, ROOT / "launch" / "train.py", "--config", ROOT / "configs" / "quickstart.json"]
    small = ["batch.micro_batch_size=1", f"batch.global_batch_size={4 * replicas}", "run.num_steps=1000000"]
    grid = ["parallel.pp_size=2", f"parallel.dp_size={replicas}", f"run.directory={folder}"]
    with open(folder / "output", "w") as output:
        arguments = [*command, *small, *grid, "run.evaluate_every=null"]
        run = subprocess.Popen(arguments, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics, chance, seconds = folder / "metrics.jsonl", random.Random(0), []
    try:
        wait_for(run, lambda: metrics.exists() and metrics.read_text().count("\n") >= 15)
        for number in range(num_kills):
            time.sleep(0.5 * chance.random())
            os.kill(coordinator_of(run.pid), signal.SIGKILL)
            began = time.monotonic()
            wait_for(run, lambda expected=number + 1: metrics.read_text().count(CHANGE) >= expected)
            seconds.append(time.monotonic() - began)
    finally:
        run.terminate()
        run.wait()
    return seconds


def wait_for(run: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run has ended ({run.poll()}) or stands still")
        time.sleep(0.005)


def coordinator_of(stub: int) -> int:
    children = Path(f"/proc/{stub}/task/{stub}/children").read_text().split()
    return next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "p3d-coordinator")


if __name__ == "__main__":
    main()
