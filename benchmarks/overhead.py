"""What elasticity costs while nobody dies: the steps of two source trees, or of two settings, in turn.

    git worktree add ../before REVISION          # a tree from before elasticity
    python benchmarks/overhead.py --baseline ../before [--rounds 5] [--steps 40]

runs the quickstart model on pp2 x dp2, round after round: the baseline, this tree without backups of the optimizer's
state (the same work: what is left is heartbeats, entries, epochs, abort tokens), and this tree with them. Printed are
medians of a step and the ratios within each round. Without `--baseline` only the price of backups is measured.
Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
WARMUP_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="The price of elasticity without failures.")
    parser.add_argument("--baseline", type=Path, help="root of another source tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of a run")
    options = parser.parse_args()
    contestants: dict[str, tuple[Path, list[str]]] = {
        **({"baseline": (options.baseline.resolve(), [])} if options.baseline else {}),
        "elastic, no backups": (ROOT, ["elastic.zero_backups=0"]),
        "elastic, backups": (ROOT, ["elastic.zero_backups=1"]),
    }
    steps: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, (root, overrides) in contestants.items():
            steps[name].append(run(root, overrides, options.steps))
    first = next(iter(contestants))
    print(f"| | median step | against {first}, by round: median [all] |")
    print("|---|---|---|")
    for name in contestants:
        ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(steps[name], steps[first])]
        every = " ".join(f"{ratio:.3f}" for ratio in ratios)
        median_s = statistics.median(step for each in steps[name] for step in each)
        print(f"| {name} | {1e3 * median_s:.1f} ms | {statistics.median(ratios):.3f} [{every}] |")


def run(root: Path, overrides: list[str], num_steps: int) -> list[float]:
    """Seconds of each timed step."""
    with TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "launch/train.py", "--config", "configs/quickstart.json", f"run.directory={folder}/run"),
            *(f"run.num_steps={num_steps + WARMUP_STEPS}", "run.evaluate_every=null", "run.evaluate_batches=1"),
            *overrides,
        ]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return [line["step_s"] for line in lines if "event" not in line][WARMUP_STEPS:]


if __name__ == "__main__":
    main()
