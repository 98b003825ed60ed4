"""FlexiTrain's experiment, small: a convolutional network, 4 workers, 2 of which are killed, beside no fault.

    pip install -c constraints.txt -e '.[experiments]'
    python benchmarks/drop_in_faults.py --seeds 3 --epochs 14

Runs examples/digits_elastic.py (redo) and examples/digits_drop.py (drop) for each seed, undisturbed and with two
workers killed, and prints training loss, test accuracy and whether the weights are the same bits. The digits are
scikit-learn's handwritten ones; `--data drawn` needs no package.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"redo": "digits_elastic.py", "drop": "digits_drop.py"}
RUN_S = 900.0
REPORT = re.compile(r"training loss ([\d.]+), test accuracy ([\d.]+), weights (\S+)")


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    loss: float
    accuracy: float
    weights: str
    recovery_s: tuple[float, ...]
    num_joins: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--data", choices=("handwritten", "drawn"), default="handwritten")
    parser.add_argument("--rejoins", type=int, default=0)
    parser.add_argument("--kill", default="20:1,50:3", help="STEP:WORKER of each fault")
    parser.add_argument("--modes", default=",".join(SCRIPTS))
    options = parser.parse_args()
    if options.data == "handwritten" and importlib.util.find_spec("sklearn") is None:
        sys.exit("scikit-learn is missing: pip install -c constraints.txt -e '.[experiments]', or --data drawn")
    faults = [(int(step), int(worker)) for step, _, worker in (each.partition(":") for each in options.kill.split(","))]
    for mode in options.modes.split(","):
        outcomes: dict[str, list[Outcome]] = {"no fault": [], "faults": []}
        for seed in range(options.seeds):
            for name, injected in (("no fault", []), ("faults", faults)):
                arguments = [f"--seed={seed}", f"--epochs={options.epochs}", f"--rejoins={options.rejoins}"]
                arguments.append(f"--data={options.data}")
                outcomes[name].append(run(SCRIPTS[mode], arguments, injected))
                print(f"{mode:5} seed {seed} {name:9} {outcomes[name][-1]}", flush=True)
        summarise(mode, outcomes)


def run(script: str, arguments: list[str], faults: list[tuple[int, int]]) -> Outcome:
    directory, out = run_with_faults(ROOT / "examples" / script, arguments, faults)
    found = REPORT.search(out)
    assert found, out
    changes = [line for line in read_lines(directory) if line.get("event") == "membership"]
    losses = [change for change in changes if not change["joined"]]
    times = ("detect_s", "agree_s", "repair_s", "regroup_s")
    return Outcome(
        loss=float(found[1]),
        accuracy=float(found[2]),
        weights=found[3],
        recovery_s=tuple(round(sum(change[name] or 0.0 for name in times), 3) for change in losses),
        num_joins=len(changes) - len(losses),
    )


def run_with_faults(script: Path, arguments: list[str], faults: list[tuple[int, int]]) -> tuple[Path, str]:
    """Runs a script, and kills workers as soon as a step is done; returns its directory and what it printed."""
    directory = Path(tempfile.mkdtemp(prefix="drop-in-"))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), f"--directory={directory}", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    deadline, left = time.monotonic() + RUN_S, list(faults)
    while process.poll() is None and left and time.monotonic() < deadline:
        if any(line.get("step", 0) >= left[0][0] and "event" not in line for line in read_lines(directory)):
            log = (directory / "logs" / f"rank-{left.pop(0)[1]}.log").read_text()
            os.kill(int(log.split(" is process ")[1].split()[0]), signal.SIGKILL)
        time.sleep(0.005)
    out, _ = process.communicate(timeout=RUN_S)
    assert process.returncode == 0 and not left, (process.returncode, out)
    return directory, out


def read_lines(directory: Path) -> list[dict]:
    path = directory / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def summarise(mode: str, outcomes: dict[str, list[Outcome]]) -> None:
    for field in ("loss", "accuracy"):
        values = {name: [getattr(each, field) for each in list_] for name, list_ in outcomes.items()}
        means = {name: statistics.mean(each) for name, each in values.items()}
        spread = statistics.stdev(values["no fault"]) if len(values["no fault"]) > 1 else float("nan")
        print(f"{mode:5} {field:8} no fault {means['no fault']:.6f} (sd {spread:.6f}), faults {means['faults']:.6f}")
    same = [a.weights == b.weights for a, b in zip(outcomes["no fault"], outcomes["faults"])]
    print(f"{mode:5} same bits with faults: {sum(same)} of {len(same)} seeds", flush=True)


if __name__ == "__main__":
    main()
