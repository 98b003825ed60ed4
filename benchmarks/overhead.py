"""What elasticity costs while nobody dies: the steps of runs with and without it, in turn.

    python benchmarks/overhead.py [--rounds 5] [--steps 40] [--baseline TREE]

runs the quickstart model on pp2 x dp2, round after round and every other round backwards: with heartbeats, abort tokens
and progress frames taken away (inelastic.py) and no backups of the optimizer's state; as it is, without backups; and
with them. `--baseline` adds another source tree (`git worktree add ../before REVISION`). Printed are the medians of a
step and the ratios within each round, of medians and of lower quartiles: noise only ever makes a step longer. Nothing
else may run meanwhile: a single round scatters by 3 %. `--aids` measures monitors and debug aids in the same way:
none, norms of weights and second moments every tenth and every step, as shipped (overdue steps are told, too), and the
replica check in every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
WARMUP_STEPS = 5
TRAIN = "launch/train.py"
ELASTICITY = {
    "nothing of it": ["benchmarks/inelastic.py", "elastic.zero_backups=0"],
    "elastic, no backups": [TRAIN, "elastic.zero_backups=0"],
    "elastic, backups": [TRAIN, "elastic.zero_backups=1"],
}
AIDS = {
    "no aids": [TRAIN, "debug.overdue_factor=null", "monitor.norms_every=null"],
    "norms every 10 steps": [TRAIN, "debug.overdue_factor=null", "monitor.norms_every=10"],
    "norms every step": [TRAIN, "debug.overdue_factor=null"],
    "as shipped": [TRAIN],
    "replica check every step": [TRAIN, "debug.replica_check_every=1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The price of elasticity without failures.")
    parser.add_argument("--baseline", type=Path, help="root of another source tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of a run")
    parser.add_argument("--aids", action="store_true", help="the price of the debug aids in place of backups")
    options = parser.parse_args()
    contestants: dict[str, tuple[Path, list[str]]] = {
        **({"baseline": (options.baseline.resolve(), [TRAIN])} if options.baseline else {}),
        **{name: (ROOT, command) for name, command in (AIDS if options.aids else ELASTICITY).items()},
    }
    steps: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for number in range(options.rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            root, command = contestants[name]
            steps[name].append(run(root, *command, num_steps=options.steps))
    first = next(iter(contestants))
    print(f"| | median step | against {first}: medians | lower quartiles | all (lower quartiles) |")
    print("|---|--:|--:|--:|---|")
    for name in contestants:
        median_s = statistics.median(step for each in steps[name] for step in each)
        medians = compare(statistics.median, steps[name], steps[first])
        quartiles = compare(lower_quartile, steps[name], steps[first])
        every = " ".join(f"{ratio:.3f}" for ratio in quartiles)
        print(
            f"| {name} | {1e3 * median_s:.1f} ms | {statistics.median(medians):.3f} | "
            f"{statistics.median(quartiles):.3f} | {every} |"
        )


def compare(summary: Callable[[list[float]], float], ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    """Ratio of a summary of the steps, round by round."""
    return [summary(a) / summary(b) for a, b in zip(ours, theirs)]


def lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


def run(root: Path, script: str, *overrides: str, num_steps: int) -> list[float]:
    """Seconds of each timed step."""
    with TemporaryDirectory() as folder:
        command = [
            *(sys.executable, script, "--config", "configs/quickstart.json", f"run.directory={folder}/run"),
            *(f"run.num_steps={num_steps + WARMUP_STEPS}", "run.evaluate_every=null", "run.evaluate_batches=1"),
            *overrides,
        ]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return [line["step_s"] for line in lines if "event" not in line][WARMUP_STEPS:]


if __name__ == "__main__":
    main()
