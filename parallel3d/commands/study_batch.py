"""`study batch`: the same number of tokens with several global batches, and the curve through their losses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import fsum, isfinite, sqrt
from pathlib import Path
from typing import Any

from parallel3d.commands.study_parsers import chosen_seeds
from parallel3d.commands.study_runs import StudyRunner, print_line, study_config
from parallel3d.config.derived import stage_replicas, tokens_per_step
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.sections.warmup import WarmupConfig
from parallel3d.config.warmup_builder import run_length
from parallel3d.costs.batch_search import largest_divisor
from parallel3d.costs.fits import BatchCurve
from parallel3d.errors import UserError
from parallel3d.studies.batch_verdict import BatchVerdict, judge_batches, nearest_power_of_two
from parallel3d.studies.seed_noise import SeedSpread
from parallel3d.studies.study_run import StudyRun
from parallel3d.studies.text_table import draw_columns, number

LEAST_BATCHES = 3
SCALES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""Exponents of the learning rate over the batch."""


def study_batch(options: argparse.Namespace) -> int:
    """Runs the study; prints the table and the optimum. Returns the exit code."""
    config = resolve(load_config(options.config, options.overrides), config_path=options.config)
    if len(set(options.batches)) < LEAST_BATCHES:
        raise UserError(f"--batches: a curve needs {LEAST_BATCHES} or more different ones")
    num_tokens = int(options.tokens or run_length(config).num_tokens)
    seeds = chosen_seeds(options.seeds, config.run.seed)
    runner = StudyRunner(
        options.out or Path(f"runs/{Path(options.config).stem}-batch-study"), num_runs=len(options.batches) * len(seeds)
    )
    configs = {
        (batch, seed): with_batch(
            config,
            runner.folder_of(f"batch{batch}-seed{seed}"),
            batch,
            seed=seed,
            num_tokens=num_tokens,
            lr_exponent=SCALES[options.scale_lr],
        )
        for seed in seeds
        for batch in options.batches
    }
    runs: dict[int, list[StudyRun]] = {batch: [] for batch in options.batches}
    for (batch, seed), each in configs.items():
        runs[batch].append(runner.run(f"batch{batch}-seed{seed}", each))
    points = {batch: losses for batch, found in runs.items() if (losses := _losses(found))}
    if len(points) < LEAST_BATCHES:
        raise UserError(f"only {len(points)} batches reached an end: a curve needs {LEAST_BATCHES}")
    means = [(batch, fsum(losses) / len(losses)) for batch, losses in points.items()]
    curve = BatchCurve.fit(means)
    verdict = judge(means, curve, noise_of(list(points.values())))
    result = _as_json(options, num_tokens, runs, curve, verdict)
    result["written_to"] = str(runner.write_result(result))
    print_line(
        json.dumps(result, indent=2) if options.json else "\n".join(_describe(configs, runs, curve, verdict, result))
    )
    return 0


def with_batch(config: Config, folder: Path, batch: int, *, seed: int, num_tokens: int, lr_exponent: float) -> Config:
    """The configuration with another global batch, as many tokens, and its learning rates at equal tokens.

    The warmup and the decay are scaled with the steps, and evaluations read about as many tokens. Raises ConfigError
    where the layout does not fit the batch.
    """
    sequences = config.batch.global_batch_size
    assert sequences is not None and config.batch.micro_batch_size is not None, "needs a resolved configuration"
    share = batch / sequences
    steps = max(1, round(num_tokens / (batch * config.batch.sequence_length)))
    micro = largest_divisor(max(1, batch // max(stage_replicas(config))), config.batch.micro_batch_size)
    micro = next(size for size in range(micro, 0, -1) if batch % size == 0)
    changes: dict[str, Mapping[str, Any]] = {
        "run": {"seed": seed, "evaluate_batches": max(1, round(config.run.evaluate_batches / share))},
        "batch": {"global_batch_size": batch, "micro_batch_size": micro, "num_micro_batches": batch // micro},
        "lr_schedule": {
            "warmup_steps": min(steps, round(config.lr_schedule.warmup_steps / share)),
            **({"decay_steps": steps} if config.lr_schedule.decay_tokens is None else {}),
        },
        "warmup": WarmupConfig().model_dump(),
        "optimizer": {"learning_rate": config.optimizer.learning_rate * share**lr_exponent},
    }
    return study_config(config, folder, num_steps=steps, changes=changes)


def noise_of(losses: Sequence[Sequence[float]]) -> float | None:
    """The standard deviation of a loss over seeds, pooled over the batches; None where each has one seed."""
    spreads = [spread for each in losses if (spread := SeedSpread.of(each)).sd is not None]
    freedom = sum(spread.num_seeds - 1 for spread in spreads)
    return sqrt(fsum((s.num_seeds - 1) * (s.sd or 0.0) ** 2 for s in spreads) / freedom) if freedom else None


def judge(points: Sequence[tuple[int, float]], curve: BatchCurve, noise_sd: float | None) -> BatchVerdict:
    optimum = curve.best_batch if curve.a > 0 else float("inf")
    return judge_batches(points, curvature=curve.a, optimum=optimum, r_squared=curve.r_squared, noise_sd=noise_sd)


def _losses(runs: Sequence[StudyRun]) -> list[float]:
    return [run.judged_loss for run in runs if run.judged_loss is not None]


# --- the result -------------------------------------------------------------------------------------------------------


def _describe(
    configs: Mapping[tuple[int, int], Config],
    runs: Mapping[int, Sequence[StudyRun]],
    curve: BatchCurve,
    verdict: BatchVerdict,
    result: Mapping[str, Any],
) -> Iterator[str]:
    """Yields a row per batch, the curve, and the verdict."""
    rows = [["batch", "steps", "tokens", "learning rate", "loss", "sd", "curve", "tokens/s"]]
    per_step = {batch: tokens_per_step(each) for (batch, _), each in configs.items()}
    rates = {batch: each.optimizer.learning_rate for (batch, _), each in configs.items()}
    for batch, found in runs.items():
        spread = SeedSpread.of(losses) if (losses := _losses(found)) else None
        speeds = [per_step[batch] / run.step_s for run in found if run.step_s]
        rows.append(
            [
                str(batch),
                str(len(found[0].losses)),
                f"{found[0].tokens:,}",
                f"{rates[batch]:.3g}",
                number(spread.mean if spread else None),
                number(spread.sd if spread else None),
                number(curve.at(batch)),
                number(sum(speeds) / len(speeds) if speeds else None, ",.0f"),
            ]
        )
    yield from draw_columns(rows)
    yield ""
    yield f"loss = {curve.a:.4f} ln^2 b {curve.c:+.4f} ln b {curve.d:+.4f}, R^2 {curve.r_squared:.3f}"
    yield f"lowest measured loss: batch {verdict.best_measured}"
    if verdict.optimum is not None and isfinite(verdict.optimum):
        power = nearest_power_of_two(verdict.optimum)
        yield f"the curve's optimum: {verdict.optimum:,.1f} (nearest power of two {power})"
    if verdict.is_illustrative:
        yield "take the optimum as an illustration only:"
        yield from (f"  {doubt}" for doubt in verdict.doubts)
    yield f"written to {result['written_to']}"


def _as_json(
    options: argparse.Namespace,
    num_tokens: int,
    runs: Mapping[int, Sequence[StudyRun]],
    curve: BatchCurve,
    verdict: BatchVerdict,
) -> dict[str, Any]:
    return {
        "kind": "batch",
        "config": options.config,
        "overrides": options.overrides,
        "num_tokens": num_tokens,
        "scale_lr": options.scale_lr,
        "curve": asdict(curve),
        "optimum": verdict.optimum,
        "best_measured": verdict.best_measured,
        "is_illustrative": verdict.is_illustrative,
        "doubts": verdict.doubts,
        "runs": {str(batch): [run.summary() for run in each] for batch, each in runs.items()},
    }
