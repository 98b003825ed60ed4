"""Trains four replicas of which one is slow for some steps, and compares the steps with what the routes promise.

    python benchmarks/balance.py [--steps 90] [--slow-steps 50] [--text FILE]

The loop as users run it (`elastic.balance`): measured speeds, the entry, the plan, the routes. Since two cores can't
compute for four workers at once, all of them sleep for 15/16 of each compute, of 32 micro-batches a step, and
replica 3 takes twice as long as the others for some steps. It prints the median step before the routes have changed,
with the new ones, and after the speed has returned; the ratio beside the planned one; the changes of routes; and in how
many steps the loss is that of the run without balance (sums are exact).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 900.0
SLEEP, BEGIN = 16.0, 3
"""How many times as long as its computing a compute takes; the step in which one replica becomes slow."""
FLAGS = (
    *("parallel.pp_size=1", "parallel.tp_size=1", "parallel.dp_size=4", "precision.sums=exact"),
    *("model.vocab_size=512", "model.hidden_size=32", "model.intermediate_size=96", "model.num_attention_heads=2"),
    *("model.num_hidden_layers=2", "batch.sequence_length=16", "batch.micro_batch_size=1"),
    *("batch.global_batch_size=32", "lr_schedule.kind=constant"),
    *("run.evaluate_every=null", "monitor.charts=false", "monitor.peak_flops=1e9"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--slow-steps", type=int, default=50, help="steps in which replica 3 is slow")
    parser.add_argument("--text", help="a file or folder of text; Python's standard library if not given")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        faults = [{"rank": rank, "kind": "slow", "factor": SLEEP} for rank in range(4)]
        faults.append({"rank": 3, "kind": "slow", "step": BEGIN, "num_steps": options.slow_steps, "factor": 2 * SLEEP})
        flags = ("elastic.balance=true", f"elastic.faults={json.dumps(faults)}")
        balanced = train(Path(folder, "balanced"), options, flags)
        undisturbed = train(Path(folder, "undisturbed"), options, ("elastic.balance=false",))
    print("\n".join(describe(balanced, [line["loss"] for line in steps_of(undisturbed)], options.slow_steps)))


def train(directory: Path, options: argparse.Namespace, flags: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the lines of the run's metrics."""
    sources = [f"data.sources={json.dumps([options.text])}"] if options.text else []
    own = [f"run.num_steps={options.steps}", f"run.directory={directory}"]
    command = [sys.executable, str(ROOT / "launch/train.py"), "--config", "quickstart", *FLAGS, *sources, *own, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=LIMIT_S)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def steps_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "event" not in line]


def describe(lines: list[dict[str, Any]], undisturbed: list[float], slow_steps: int) -> Iterator[str]:
    """The outcome, in lines."""
    steps = steps_of(lines)
    changes = [line for line in lines if line.get("event") == "balance"]
    equal = sum(line["loss"] == loss for line, loss in zip(steps, undisturbed))
    if not changes:
        yield "the routes have not changed"
    for change in changes:
        slow = ", ".join(f"{name} {factor:g} x" for name, factor in change["slow"].items()) or "none"
        yield f"new routes after step {change['step']}: slow are {slow}; planned {change['step_share']:.3f} x"
    if changes:
        first = changes[0]["step"]
        before = median_s(steps, BEGIN, first)
        after = median_s(steps, first + 2, BEGIN + slow_steps - 1)  # the new routes' first step plans them
        ratio = after / before
        yield f"step {before:.3f} s with equal shares, {after:.3f} s with the routes by speed: {ratio:.3f} x"
        yield f"measured / planned: {ratio / changes[0]['step_share']:.3f}"
        if len(changes) > 1:
            yield f"after the speed has returned: {median_s(steps, changes[-1]['step'] + 2, len(steps)):.3f} s"
    yield f"losses that are those of the run without balance bit for bit: {equal} of {len(undisturbed)}"


def median_s(steps: list[dict[str, Any]], first: int, last: int) -> float:
    """The median time of these steps."""
    return statistics.median(line["step_s"] for line in steps if first <= line["step"] <= last)


if __name__ == "__main__":
    main()
