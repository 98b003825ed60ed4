"""Measures the time of a recovery, from the signal to the repeated step, and of its parts.

`python benchmarks/recovery.py [--runs 10] [--only quickstart] [--out build/recovery.json]` starts one training run
after the other on this machine, kills (or stops) one worker in each, every time in another phase of a step, and prints
a table of medians. Nothing else may run meanwhile.

The parts come from the run's own membership record; `to step` is measured apart: from the moment at which the worker
sends itself the signal to the moment at which the last worker begins the step again, as they stand in their logs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("forward", "send", "backward", "reduce_scatter", "backup", "all_reduce", "update", "all_gather")
STEP = 4  # the first two have longer timeouts
PARTS = ("detect_s", "agree_s", "repair_s", "regroup_s", "first_step_s")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    replicas: int
    kind: str = "kill"
    overrides: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        return 2 * self.replicas


def model(hidden_size: int, intermediate_size: int, num_layers: int) -> tuple[str, ...]:
    return (
        f"model.hidden_size={hidden_size}",
        f"model.intermediate_size={intermediate_size}",
        f"model.num_hidden_layers={num_layers}",
        "model.num_attention_heads=8",
        "batch.sequence_length=32",
        "batch.micro_batch_size=1",
        "batch.global_batch_size=10",
    )


MODELS = {
    "quickstart": ("batch.micro_batch_size=1", "batch.global_batch_size=20"),
    "5M a stage": model(512, 1792, 2),
    "20M a stage": model(640, 1664, 8),
}
CASES = [
    *(
        Case(name=name, replicas=replicas, overrides=overrides)
        for name, overrides in MODELS.items()
        for replicas in (2, 5)
    ),
    *(
        Case(name="quickstart, SIGSTOP", replicas=replicas, kind="stop", overrides=MODELS["quickstart"])
        for replicas in (2, 5)
    ),
]


def main() -> None:
    options = parse_arguments()
    cases = [case for case in CASES if options.only is None or options.only == case.name]
    results: dict[str, list[dict[str, Any]]] = {}
    for number in range(options.runs):  # in turn, so that noise hits all alike
        for case in cases:
            result = run(case, number)
            results.setdefault(f"{case.name}, {case.num_ranks} ranks", []).append(result)
            print(f"run {number + 1}: {case.name}, {case.num_ranks} ranks: {result}", file=sys.stderr, flush=True)
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps(results, indent=2))
    print_table(results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure recoveries.")
    parser.add_argument("--runs", type=int, default=10, help="runs of each case")
    parser.add_argument("--only", help=f"one of {sorted({case.name for case in CASES})}")
    parser.add_argument("--out", help="JSON file for every run")
    return parser.parse_args()


def run(case: Case, number: int) -> dict[str, Any]:
    """One run with one fault: seconds and bytes."""
    rank = (1 + 3 * number) % case.num_ranks
    fault = dict(rank=rank, step=STEP, phase=PHASES[number % len(PHASES)], kind=case.kind)
    with TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "launch/train.py", "--config", "configs/quickstart.json", f"run.directory={folder}/run"),
            *(f"parallel.dp_size={case.replicas}", *case.overrides, f"elastic.faults={json.dumps([fault])}"),
            *(f"run.num_steps={STEP + 2}", "run.evaluate_batches=1", "run.evaluate_every=null"),
            "elastic.max_rejoins=0",
        ]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        (change,) = [line for line in lines if line.get("event") == "membership"]
        logs = {path.stem: path.read_text() for path in Path(folder, "run/logs").glob("rank-*.log")}
    signalled_s = _time(r"injected fault: \w+ at", logs.pop(f"rank-{rank}"))
    again_s = max(_time(rf"generation {change['generation']}: training again at", log) for log in logs.values())
    return {
        "phase": fault["phase"],
        "rank": rank,
        **{part: change[part] for part in PARTS},
        "to_step_s": again_s - signalled_s,
        "moved_mib": change["moved_bytes"] / 2**20,
        "direction": change["forward_or_back"],
    }


def _time(pattern: str, log: str) -> float:
    found = re.search(pattern + r" ([0-9.]+)", log)
    assert found is not None, f"{pattern} does not stand in: {log}"
    return float(found[1])


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    """Medians in seconds; of the last column the largest as well."""
    print("| model | noticed | agreed | repaired | regrouped | to step: median [worst] | first step | MiB moved |")
    print("|---|---|---|---|---|---|---|---|")
    for name, runs in results.items():
        parts = {part: statistics.median(run[part] for run in runs) for part in PARTS}
        to_step = [run["to_step_s"] for run in runs]
        print(
            f"| {name} | {parts['detect_s']:.3f} | {parts['agree_s']:.3f} | {parts['repair_s']:.3f} | "
            f"{parts['regroup_s']:.3f} | {statistics.median(to_step):.3f} [{max(to_step):.3f}] | "
            f"{parts['first_step_s']:.3f} | {statistics.median(run['moved_mib'] for run in runs):.1f} |"
        )


if __name__ == "__main__":
    main()
