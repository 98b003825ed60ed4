"""Compares sequence-length warmup with its rivals at an aggressive learning rate and batch, on two CPU cores.

    python benchmarks/slw.py [--out build/slw] [--seeds 1,2,3] [--recipes baseline,slw,...] [section.field=value ...]

The question of Table 1 and Figure 4 of "Sequence Length Warmup" (Li et al. 2022): which recipe trains without loss
spikes, and to what validation loss after equally many tokens? Six recipes with three seeds each, on the built-in text
or on data.sources=[...]: a GPT-2 of 0.6M parameters on bytes, all with the same tokens, the same learning rates by
tokens (except in one recipe) and the same full-length validation. Two runs at a time, one thread each; losses do not
depend on other work on the machine. Finished runs in --out are reused. Writes the figures as JSON and prints Markdown
tables.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import exp, isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d.errors import EXIT_DIVERGED
from parallel3d.monitor.correlation import Correlation, correlate
from parallel3d.monitor.loss_ratio import LossRatio
from parallel3d.monitor.run_folder import METRICS, read_metrics

FULL, BATCH, STEPS = 128, 32, 100
"""Tokens of a sequence, sequences of a step, steps of the baseline."""
WARMUP_STEPS = 10
LEARNING_RATE = 1e-2
TOKENS = FULL * BATCH * STEPS
CONFIG: dict[str, Any] = {
    "description": "A GPT-2 of 0.6M parameters on bytes, at a learning rate and batch that are too large for it.",
    "model": {
        "architecture": "gpt2",
        "vocab_size": 257,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
        "initializer_depth_scaling": "num_layers",
    },
    "batch": {"global_batch_size": BATCH, "micro_batch_size": 8, "sequence_length": FULL},
    "optimizer": {
        "learning_rate": LEARNING_RATE,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    },
    "lr_schedule": {"kind": "cosine", "warmup_steps": WARMUP_STEPS, "decay_tokens": TOKENS, "min_ratio": 1 / 15},
    "data": {"tokenizer": {"kind": "bytes"}},
    "checkpoint": {"save_at_end": False},
    "monitor": {"divergence": "warn"},
    "run": {"num_tokens": TOKENS, "threads_per_rank": 1, "evaluate_every": 10, "evaluate_batches": 1},
}
SLW_STEPS = 60
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "baseline": {},
    "slw": {"warmup.sequence_length": {"kind": "linear", "start": 8, "duration": SLW_STEPS}},
    "shortformer": {"warmup.sequence_length": {"kind": "discrete", "lengths": [16, FULL], "until": [STEPS // 2]}},
    "batch warmup": {"warmup.batch_size": {"start": 8, "duration": SLW_STEPS}},
    "learning rate / 4": {"optimizer.learning_rate": LEARNING_RATE / 4},
    "clip at 0.25": {"optimizer.max_grad_norm": 0.25},
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Figures of one run."""

    recipe: str
    seed: int
    num_steps: int
    num_unstable: int
    """Steps with a loss ratio above 1.2."""
    max_ratio: float | None
    diverged: bool
    final_loss: float | None
    """Validation loss after all tokens, in nats per token."""
    evaluations: tuple[tuple[int, float], ...]
    """(tokens trained, validation loss)."""
    norm: Correlation | None
    """Correlations of the loss ratio with the l1 norm of Adam's sqrt(v), and with its largest element."""
    maximum: Correlation | None
    step_s: Mapping[int, float]
    """The fastest step of each sequence length."""


def main() -> None:
    options = parse_arguments()
    seeds, recipes = [int(seed) for seed in options.seeds.split(",")], options.recipes.split(",")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2))
    jobs = [
        (recipe, seed) for seed in seeds for recipe in recipes
    ]  # seed by seed: an unfinished table has rows of equal length
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(lambda job: run(*job, out, options.overrides), jobs))
    (out / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    print(stability_table(results))
    print()
    print(quality_table(results))
    print()
    print(cost_model(results))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "build/slw"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="overrides for all runs")
    return parser.parse_args()


# --- runs -------------------------------------------------------------------------------------------------------------


def run(recipe: str, seed: int, out: Path, overrides: Sequence[str]) -> Result:
    """Trains one run, unless its results exist."""
    folder = out / f"{recipe.replace(' / ', '-').replace(' ', '-')}-{seed}"
    code_file = folder / "exit_code"
    if not code_file.exists():
        settings = {"run.directory": str(folder), "run.seed": seed, **RECIPES[recipe]}
        command = [sys.executable, str(ROOT / "launch/train.py"), "--config", str(out / "config.json")]
        command += [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, EXIT_DIVERGED):
            sys.exit(f"{recipe}, seed {seed} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        code_file.write_text(str(done.returncode))
        print(f"{recipe}, seed {seed}: done", file=sys.stderr, flush=True)
    return read(recipe, seed, folder, diverged=int(code_file.read_text()) == EXIT_DIVERGED)


def read(recipe: str, seed: int, folder: Path, *, diverged: bool) -> Result:
    """Reads the figures of a finished run from its metrics."""
    lines = read_metrics(folder / METRICS)
    steps = [line for line in lines if "event" not in line]
    fold, ratios = LossRatio(), []
    for line in steps:
        fold = fold.after(float("nan") if line["loss"] is None else line["loss"])
        ratios.append(float("nan") if fold.newest is None else fold.newest)
    tokens = {line["step"]: line["tokens"] for line in steps}
    evaluations = [(tokens[line["step"]], line["loss"]) for line in lines if line.get("event") == "evaluation"]
    step_s: dict[int, float] = {}
    for line in steps[WARMUP_STEPS:]:
        length, seconds = line["sequence_length"], line["step_s"]
        step_s[length] = min(seconds, step_s.get(length, seconds))
    return Result(
        recipe=recipe,
        seed=seed,
        num_steps=len(steps),
        num_unstable=fold.num_unstable,
        max_ratio=fold.largest,
        diverged=diverged,
        final_loss=None if diverged or not evaluations else evaluations[-1][1],
        evaluations=tuple(evaluations),
        norm=correlate(ratios, [figure(line, "variance_norm") for line in steps]),
        maximum=correlate(ratios, [figure(line, "variance_max") for line in steps]),
        step_s=step_s,
    )


def figure(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    return float("nan") if value is None else value


# --- tables -----------------------------------------------------------------------------------------------------------


def by_recipe(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups = defaultdict(list)
    for result in results:
        groups[result.recipe].append(result)
    return groups


def stability_table(results: Sequence[Result]) -> str:
    """Table 1, and Table 3's correlations; the seeds side by side."""
    lines = [
        "| recipe | steps | loss ratio > 1.2, by seed | share | largest ratio | r with norm (p) | r with max (p) |",
        "|---|--:|---|--:|---|---|---|",
    ]
    for recipe, runs in by_recipe(results).items():
        share = sum(run.num_unstable for run in runs) / sum(run.num_steps for run in runs)
        lines.append(
            f"| {recipe} | {runs[0].num_steps} | {listed(str(run.num_unstable) for run in runs)} | {share:.1%} "
            f"| {listed(ratio_text(run) for run in runs)} | {listed(r_text(run.norm) for run in runs)} "
            f"| {listed(r_text(run.maximum) for run in runs)} |"
        )
    return "\n".join(lines)


def quality_table(results: Sequence[Result]) -> str:
    """Both readings of a win: the loss after all tokens, and the tokens to the baseline's final loss, seed by seed."""
    first = {run.seed: run for run in results if run.recipe == results[0].recipe}
    lines = [
        f"| recipe | validation loss, by seed | mean | perplexity | - {results[0].recipe}, by seed "
        f"| share of the tokens until {results[0].recipe}'s last loss is beaten, by seed |",
        "|---|---|--:|--:|---|---|",
    ]
    for recipe, runs in by_recipe(results).items():
        known = [run.final_loss for run in runs if run.final_loss is not None]
        average = f"{mean(known):.4f} | {exp(mean(known)):.1f}" if known else "- | -"
        lines.append(
            f"| {recipe} | {listed(number_text(run.final_loss) for run in runs)} | {average} "
            f"| {listed(difference_text(run, first[run.seed]) for run in runs)} "
            f"| {listed(share_text(run, first[run.seed]) for run in runs)} |"
        )
    return "\n".join(lines)


def cost_model(results: Sequence[Result]) -> str:
    """Seconds of a step by its length L, as a + b L + c L^2: least squares on the fastest step of each length."""
    fastest: dict[int, float] = {}
    for run in results:
        if run.recipe != "batch warmup":  # its steps have fewer sequences
            for length, seconds in run.step_s.items():
                fastest[length] = min(seconds, fastest.get(length, seconds))
    lengths = np.array(sorted(fastest), dtype=float)
    seconds = np.array([fastest[int(length)] for length in lengths])
    if len(lengths) < 3:
        return "the cost model needs steps of three lengths"
    terms = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1)
    (a, b, c), *_ = np.linalg.lstsq(terms, seconds, rcond=None)
    worst = np.abs(terms @ (a, b, c) / seconds - 1).max()
    return (
        f"a step of length L takes {1e3 * a:.1f} ms + {1e3 * b:.3f} ms L + {1e6 * c:.2f} us L^2 (fastest step of each"
        f" of {len(lengths)} lengths, {int(lengths[0])} to {int(lengths[-1])}; the fit is off by {worst:.0%} at most)"
    )


def first_to_beat(run: Result, reference: Result) -> float | None:
    """Share of the tokens after which the validation loss is at most the reference's last one; None: never."""
    if reference.final_loss is None:
        return None
    beating = (tokens for tokens, loss in run.evaluations if loss is not None and loss <= reference.final_loss)
    tokens = next(beating, None)
    return None if tokens is None else min(1.0, tokens / TOKENS)  # the last step may go beyond


def listed(texts: Any) -> str:
    return " ".join(texts)


def ratio_text(run: Result) -> str:
    return "diverged" if run.diverged else number_text(run.max_ratio, 2)


def number_text(value: float | None, digits: int = 4) -> str:
    return "-" if value is None or not isfinite(value) else f"{value:.{digits}f}"


def difference_text(run: Result, reference: Result) -> str:
    if run.final_loss is None or reference.final_loss is None:
        return "-"
    return f"{run.final_loss - reference.final_loss:+.4f}"


def share_text(run: Result, reference: Result) -> str:
    share = first_to_beat(run, reference)
    return "never" if share is None else f"{share:.0%}"


def r_text(correlation: Correlation | None) -> str:
    return "-" if correlation is None else f"{correlation.r:.2f} ({correlation.p:.0e})"


if __name__ == "__main__":
    main()
