"""Measures the cost of elasticity while no worker dies.

    python benchmarks/overhead.py [--rounds 5] [--blocks 80] [--parts waits notes] [--steps 40] [--baseline TREE]

runs the quickstart model on pp2 x dp2. First `--rounds` runs that switch heartbeats and abort tokens off and on in
turn, four steps each (inelastic.py): every block with them is compared with the blocks without before and after it.
All within a run, since two runs of the same configuration differ by up to 5 %. `--parts` switches only some parts; with
nothing after it, it measures the null: how far such a ratio is from 1 by chance. Then the cost of backups of the
optimizer's state, run against run and every other round backwards; `--baseline` adds another source tree (`git worktree
add ../before REVISION`). Noise only ever makes a step longer, so lower quartiles are printed, too. Nothing else may run
meanwhile. `--aids` measures the debug aids run against run: none, as shipped (slow steps are reported), and the replica
check in every step; `--balance` a run that measures its replicas and could give slow ones less work (none is slow).
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
PARTS = ("waits", "notes", "beats")
WARMUP_STEPS = 5
BLOCK = 4
TRAIN = "launch/train.py"
BACKUPS = {"no backups": [TRAIN, "elastic.zero_backups=0"], "backups": [TRAIN, "elastic.zero_backups=1"]}
BALANCE = {"equal shares": [TRAIN], "elastic.balance": [TRAIN, "elastic.balance=true"]}
DEBUG_AIDS = {
    "no aids": [TRAIN, "debug.slow_step_factor=null", "monitor.norms_every=null"],
    "norms every 10 steps": [TRAIN, "debug.slow_step_factor=null", "monitor.norms_every=10"],
    "norms every step": [TRAIN, "debug.slow_step_factor=null"],
    "as shipped": [TRAIN],
    "replica check every step": [TRAIN, "debug.replica_check_every=1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of elasticity without failures.")
    parser.add_argument("--baseline", type=Path, help="root of another source tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=80, help="blocks with elasticity in a run that switches")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, help="parts of elasticity to switch")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of a run that does not switch")
    parser.add_argument("--aids", action="store_true", help="measure the debug aids instead of backups")
    parser.add_argument("--balance", action="store_true", help="measure elastic.balance instead of backups")
    options = parser.parse_args()
    if not (options.aids or options.balance or options.baseline):
        switch_within_runs(options.rounds, options.blocks, options.parts)
    if options.parts != list(PARTS):
        return
    chosen = DEBUG_AIDS if options.aids else BALANCE if options.balance else BACKUPS
    variants: dict[str, tuple[Path, list[str]]] = {
        **({"baseline": (options.baseline.resolve(), [TRAIN])} if options.baseline else {}),
        **{name: (ROOT, command) for name, command in chosen.items()},
    }
    steps: dict[str, list[list[float]]] = {name: [] for name in variants}
    for number in range(options.rounds):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            root, command = variants[name]
            steps[name].append(run(root, *command, num_steps=options.steps))
    first = next(iter(variants))
    print(f"| | median step | against {first}: medians | lower quartiles | all (lower quartiles) |")
    print("|---|--:|--:|--:|---|")
    for name in variants:
        median_s = statistics.median(step for each in steps[name] for step in each)
        medians = compare(statistics.median, steps[name], steps[first])
        quartiles = compare(lower_quartile, steps[name], steps[first])
        every = " ".join(f"{ratio:.3f}" for ratio in quartiles)
        print(
            f"| {name} | {1e3 * median_s:.1f} ms | {statistics.median(medians):.3f} | "
            f"{statistics.median(quartiles):.3f} | {every} |"
        )


def switch_within_runs(num_rounds: int, num_blocks: int, parts: list[str]) -> None:
    """Prints each run's ratios, and all of them together."""
    every: dict[str, list[float]] = {"medians": [], "lower quartiles": []}
    for _ in range(num_rounds):
        steps = run(
            *(
                ROOT,
                "benchmarks/inelastic.py",
                f"--block={BLOCK}",
                f"--parts={','.join(parts)}",
                "elastic.zero_backups=0",
            ),
            num_steps=(2 * num_blocks + 3) * BLOCK - WARMUP_STEPS,
        )
        steps = [0.0] * WARMUP_STEPS + steps
        blocks = [
            steps[start + 1 : start + BLOCK] for start in range(0, len(steps), BLOCK)
        ]  # without the switch itself
        for name, summary in (("medians", statistics.median), ("lower quartiles", lower_quartile)):
            _, *values = map(summary, blocks)  # the first block is warmup
            ratios = [2 * on / (before + after) for before, on, after in zip(values[1::2], values[2::2], values[3::2])]
            every[name] += ratios
            print(f"{name}: {statistics.median(ratios):.4f} of {len(ratios)} blocks", flush=True)
    for name, ratios in every.items():
        middle, mean = statistics.median(ratios), statistics.mean(ratios)
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(
            f"{' '.join(parts) or 'nothing'} against none of it, {name}: {middle:.4f} (mean {mean:.4f} +- {error:.4f})"
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
            *(sys.executable, script, *overrides),
            *("--config", "configs/quickstart.json", f"run.directory={folder}/run"),
            *(f"run.num_steps={num_steps + WARMUP_STEPS}", "run.evaluate_every=null", "run.evaluate_batches=1"),
        ]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return [line["step_s"] for line in lines if "event" not in line][WARMUP_STEPS:]


if __name__ == "__main__":
    main()
