"""Compares how the number formats train: the quickstart's model on the built-in text, each policy with each seed.

    python benchmarks/convergence.py [--policies fp32,bf16,...] [--seeds 1,2,3] [--steps 300] [section.field=value ...]

A seed decides the initial weights, the order of the text and the rounding noise. Runs with the same seed have the same
initial weights and read the same tokens, so that the table also gives each policy's distance from the first one, seed
by seed: it is far smaller than the spread between seeds. Two processes (dp2), one thread each, one run after the other;
fifteen runs of 300 steps take less than 20 minutes on two idle cores.

The learning rate is a tenth of the quickstart's. Round-to-nearest loses an update that is less than half the distance
of a weight from its bf16 neighbour, 1/512 to 1/256 of the weight. AdamW's updates are about as large as the learning
rate: of the quickstart's weights (0.06) it is 8 %, which no format loses, of 5e-4 it is 0.8 %, falling to 0.08 %. Large
models train there: HLAT's 3e-4 to 3e-5 are 1.5 % to 0.15 % of weights of 0.02.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ("fp32", "bf16", "bf16_sr", "bf16_pure", "fp16")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Final losses of a run in nats per token, the training loss over its last 10 steps; None: not finite."""

    final_loss: float | None
    evaluation_loss: float | None
    num_updates: int
    step_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="overrides for all runs")
    options = parser.parse_args()
    policies, seeds = options.policies.split(","), [int(seed) for seed in options.seeds.split(",")]
    results: dict[str, list[Result]] = {policy: [] for policy in policies}
    for seed in seeds:  # seed by seed: an unfinished table has rows of equal length
        for policy in policies:
            result = run(policy, seed, options.steps, options.overrides)
            results[policy].append(result)
            print(f"{policy}, seed {seed}: {result}", file=sys.stderr, flush=True)
    print(table(results))


def run(policy: str, seed: int, num_steps: int, overrides: list[str]) -> Result:
    """Trains one run."""
    with TemporaryDirectory() as folder:
        settings = {
            "run.directory": f"{folder}/run",
            "run.seed": seed,
            "run.num_steps": num_steps,
            "run.evaluate_every": "null",
            "run.evaluate_batches": 16,
            "parallel.pp_size": 1,
            "parallel.dp_size": 2,
            "elastic.zero_backups": 0,
            "optimizer.learning_rate": 5e-4,
            "precision.policy": policy,
        }
        command = [sys.executable, "launch/train.py", "--config", "configs/quickstart.json"]
        command += [f"{name}={value}" for name, value in settings.items()]
        done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{policy}, seed {seed} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        summary = json.loads(Path(folder, "run/summary.json").read_text())
    return Result(
        final_loss=summary["final_loss"],
        evaluation_loss=summary["evaluation_loss"],
        num_updates=summary["updates"],
        step_s=summary["seconds"] / summary["steps"],
    )


def table(results: dict[str, list[Result]]) -> str:
    """Markdown: means over the seeds, their spread (largest - smallest), and distances from the first policy."""
    first = next(iter(results))
    lines = [
        f"| policy | training loss, last 10 steps | spread | - {first}, by seed | validation loss | - {first}, by seed "
        "| ms a step |",
        "|---|--:|--:|---|--:|---|--:|",
    ]
    for policy, runs in results.items():
        training = [each.final_loss for each in runs]
        validation = [each.evaluation_loss for each in runs]
        lines.append(
            f"| {policy} | {_mean(training)} | {_spread(training)} "
            f"| {_distances(training, [each.final_loss for each in results[first]])} | {_mean(validation)} "
            f"| {_distances(validation, [each.evaluation_loss for each in results[first]])} "
            f"| {1e3 * statistics.median(each.step_s for each in runs):.0f} |"
        )
    return "\n".join(lines)


def _mean(losses: list[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    lost = f" ({len(losses) - len(known)} not finite)" if len(known) < len(losses) else ""
    return (f"{statistics.mean(known):.4f}" if known else "-") + lost


def _spread(losses: list[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    return f"{max(known) - min(known):.4f}" if known else "-"


def _distances(losses: list[float | None], others: list[float | None]) -> str:
    pairs = zip(losses, others)
    return " ".join("-" if a is None or b is None else f"{a - b:+.4f}" for a, b in pairs)


if __name__ == "__main__":
    main()
