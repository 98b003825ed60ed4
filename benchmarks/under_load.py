"""Trains while other processes take the cores, and counts the workers that are evicted though nothing is wrong.

    python benchmarks/under_load.py [--minutes 10] [--factor 3] [flags of launch/train.py]

The quickstart starts undisturbed, so that its timeouts follow an idle machine; from its fifth step on `--factor` busy
processes a core run beside it. Ends with 1 if any worker or coordinator was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUIET_STEPS = 5
START_S = 300.0
STOP_S = 120.0
BUSY = "while True: pass"
EXIT_BY_SIGINT = 130


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--factor", type=int, default=3, help="busy processes a core")
    options, flags = parser.parse_known_args()
    num_busy = options.factor * len(os.sched_getaffinity(0))
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        training = start_training(run, flags)
        await_steps(run, training)
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(num_busy)]
        loads = []
        try:
            until_s = time.monotonic() + 60 * options.minutes
            while training.poll() is None and time.monotonic() < until_s:
                time.sleep(1.0)
                loads.append(os.getloadavg()[0])
        finally:
            for process in busy:
                process.kill()
                process.wait()
            if training.poll() is None:
                training.send_signal(signal.SIGINT)
        output = training.communicate(timeout=STOP_S)[0]
        lines = lines_of(run)
    return report(lines, output, code=training.returncode, loads=loads)


def start_training(run: Path, flags: list[str]) -> subprocess.Popen[str]:
    """Starts the quickstart, without an end in sight."""
    command = [sys.executable, "launch/train.py", "--config", "configs/quickstart.json", f"run.directory={run}"]
    return subprocess.Popen(
        [*command, "run.num_steps=1000000", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def await_steps(run: Path, training: subprocess.Popen[str]) -> None:
    """Waits for the steps that the load does not disturb."""
    deadline_s = time.monotonic() + START_S
    while len(steps_of(lines_of(run))) < QUIET_STEPS:
        if training.poll() is not None or time.monotonic() > deadline_s:
            training.kill()
            raise SystemExit(f"no training: {training.communicate(timeout=STOP_S)[0]}")
        time.sleep(0.1)


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The complete lines of the run's metrics."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def steps_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "event" not in line]


def report(lines: list[dict[str, Any]], output: str, *, code: int, loads: list[float]) -> int:
    """Prints what has happened; returns 1 if anything was lost."""
    steps = [line["step_s"] for line in steps_of(lines)]
    changes = [line for line in lines if line.get("event") == "membership"]
    timeouts = [line for line in output.splitlines() if line.startswith("timeouts:")]
    print(f"{len(loads)} s, load average {min(loads):.1f} to {max(loads):.1f}; {' '.join(timeouts)}")
    quiet, loaded = steps[1:QUIET_STEPS], steps[QUIET_STEPS:]
    print(
        f"{len(steps)} steps: median {statistics.median(quiet):.2f} s before, {statistics.median(loaded):.2f} s under "
        f"load, the longest {max(loaded):.2f} s"
    )
    print(f"{len(changes)} changes of membership, exit code {code}")
    for change in changes:
        print(json.dumps(change))
    if changes or code != EXIT_BY_SIGINT:
        print(output)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
