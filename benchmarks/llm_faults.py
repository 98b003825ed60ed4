"""FlexiTrain's second experiment, small: a GPT-2 of 1.05M parameters loses one of four workers half-way.

    python benchmarks/llm_faults.py --text shakespeare.txt

Trains benchmarks/llm_loop.py on the bytes of a text for each seed: undisturbed, with a worker killed and its samples
computed by the others (redo, exact sums), and with a worker killed and its samples left out (drop). Prints validation
loss, perplexity, the perplexity that the model gives to 200 bytes of its own, and those bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.drop_in_faults import run_with_faults

KINDS = {"no fault": ("redo", False), "redo": ("redo", True), "drop": ("drop", True)}
VICTIM = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", required=True, help="a file to train on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    reports: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for seed in range(options.seeds):
        for kind, (mode, is_killed) in KINDS.items():
            arguments = [f"--text={options.text}", f"--steps={options.steps}", f"--seed={seed}", f"--mode={mode}"]
            started = time.monotonic()
            faults = [(options.steps // 2, VICTIM)] if is_killed else []
            _, out = run_with_faults(ROOT / "benchmarks/llm_loop.py", arguments, faults)
            reports[kind].append(read_report(out))
            print(f"{kind} seed {seed}: {time.monotonic() - started:.0f} s, {reports[kind][-1]}", flush=True)
    print("\n".join(describe(reports)))


def read_report(out: str) -> dict[str, Any]:
    (line,) = [line for line in out.splitlines() if line.startswith("report ")]
    return json.loads(line.removeprefix("report "))


def describe(reports: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A table in Markdown, the comparison with the spread of the seeds, and what the first seed's models write."""
    losses = {kind: [each["loss"] for each in list_] for kind, list_ in reports.items()}
    lines = [
        "| worker lost | validation loss of each seed | mean | perplexity | perplexity of its own text | same bits |"
    ]
    lines.append("|---|---|--:|--:|--:|--:|")
    for kind, list_ in reports.items():
        mean, own = statistics.mean(losses[kind]), statistics.mean(each["own_perplexity"] for each in list_)
        each = ", ".join(f"{loss:.4f}" for loss in losses[kind])
        same = [a["weights"] == b["weights"] for a, b in zip(list_, reports["no fault"])]
        cells = (kind, each, f"{mean:.4f}", f"{math.exp(mean):.3f}", f"{own:.2f}", f"{sum(same)} of {len(same)}")
        lines.append(f"| {' | '.join(cells)} |")
    spread = statistics.stdev(losses["no fault"]) if len(losses["no fault"]) > 1 else math.nan
    for kind in ("redo", "drop"):
        difference = statistics.mean(losses[kind]) - statistics.mean(losses["no fault"])
        lines.append(f"{kind}: {difference:+.4f} beside a standard deviation of {spread:.4f} over the seeds")
    return lines + [f"--- {kind}\n{list_[0]['text']}" for kind, list_ in reports.items()]


if __name__ == "__main__":
    main()
