"""`study noise`: the scatter of a configuration over seeds, and a candidate compared with it seed by seed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel3d.commands.study_parsers import chosen_seeds
from parallel3d.commands.study_runs import StudyRunner, print_line, read_run_folder, study_config
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.warmup_builder import num_steps
from parallel3d.errors import UserError
from parallel3d.studies.seed_noise import (
    PairedComparison,
    SeedSpread,
    compare_by_seed,
    describe_comparison,
    describe_spread,
)
from parallel3d.studies.study_run import StudyRun
from parallel3d.studies.text_table import draw_columns, number

BASE, CANDIDATE = "base", "candidate"


def study_noise(options: argparse.Namespace) -> int:
    """Trains, or reads, both sides; prints the table and the verdict. Returns the exit code."""
    _check(options)
    groups, source = _read_folders(options) if options.runs else _train(options)
    spreads = {name: _spread_of(runs) for name, runs in groups.items()}
    found = None
    if CANDIDATE in groups:
        found = compare_by_seed(*(_losses_by_seed(groups[name]) for name in (BASE, CANDIDATE)))
    result = _as_json(groups, spreads, found, source)
    if options.out or not options.runs:
        out = options.out or Path(f"runs/{Path(options.config).stem}-noise")
        result["written_to"] = str(StudyRunner(out, num_runs=0).write_result(result))
    print_line(json.dumps(result, indent=2) if options.json else "\n".join(_describe(groups, spreads, found, result)))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises UserError where the options contradict each other."""
    if bool(options.runs) == bool(options.config):
        raise UserError("study noise needs either --config FILE, to train, or --runs FOLDER ..., of runs that exist")
    if options.candidate_runs and not options.runs:
        raise UserError("--candidate-runs needs --runs, the runs to compare with")
    if options.runs and (options.change or options.candidate or options.overrides or options.steps):
        raise UserError("--runs trains nothing: --change, --candidate, --steps and overrides have no effect with it")


# --- runs -------------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> tuple[dict[str, list[StudyRun]], dict[str, Any]]:
    base = resolve(load_config(options.config, options.overrides), config_path=options.config)
    sides = {BASE: base}
    if options.change or options.candidate:
        path = options.candidate or options.config
        sides[CANDIDATE] = resolve(load_config(path, [*options.overrides, *options.change]), config_path=path)
    seeds = chosen_seeds(options.seeds, base.run.seed)
    out = options.out or Path(f"runs/{Path(options.config).stem}-noise")
    runner = StudyRunner(out, num_runs=len(seeds) * len(sides))
    configs = {
        (name, seed): _with_seed(runner, name, sides[name], seed, options.steps) for seed in seeds for name in sides
    }
    groups: dict[str, list[StudyRun]] = {name: [] for name in sides}
    for (name, seed), config in configs.items():  # seed by seed: what was done before a stop can be compared
        groups[name].append(runner.run(f"{name}-seed{seed}", config))
    return groups, {"config": options.config, "candidate": options.candidate, "change": options.change}


def _with_seed(runner: StudyRunner, name: str, config: Config, seed: int, steps: int | None) -> Config:
    folder = runner.folder_of(f"{name}-seed{seed}")
    whole = steps or num_steps(config)
    return study_config(config, folder, num_steps=whole, changes={"run": {"seed": seed}})


def _read_folders(options: argparse.Namespace) -> tuple[dict[str, list[StudyRun]], dict[str, Any]]:
    sides = {BASE: options.runs} | ({CANDIDATE: options.candidate_runs} if options.candidate_runs else {})
    groups = {name: [read_run_folder(folder)[0] for folder in folders] for name, folders in sides.items()}
    for runs in groups.values():
        seeds = [run.seed for run in runs]
        if twice := [run.name for run in runs if seeds.count(run.seed) > 1]:
            raise UserError(f"{', '.join(twice)} have the same run.seed: give one run for each seed")
    return groups, {name: list(map(str, folders)) for name, folders in sides.items()}


# --- the result -------------------------------------------------------------------------------------------------------


def _losses_by_seed(runs: Sequence[StudyRun]) -> dict[int, float]:
    """The compared losses of the runs that reached their end."""
    return {run.seed: run.judged_loss for run in runs if run.judged_loss is not None}


def _spread_of(runs: Sequence[StudyRun]) -> SeedSpread | None:
    losses = list(_losses_by_seed(runs).values())
    return SeedSpread.of(losses) if losses else None


def _describe(
    groups: dict[str, list[StudyRun]],
    spreads: dict[str, SeedSpread | None],
    found: PairedComparison | None,
    result: dict[str, Any],
) -> Iterator[str]:
    """Yields a row per run, the spread of each side, and the verdict."""
    rows = [["run", "seed", "evaluation", "training", "steps", "ms a step"]]
    for runs in groups.values():
        for run in runs:
            step_ms = None if run.step_s is None else 1e3 * run.step_s
            losses = [number(run.evaluation_loss), number(run.final_loss)]
            rows.append([run.name, str(run.seed), *losses, str(len(run.losses)), number(step_ms, ".0f")])
    yield from draw_columns(rows)
    yield ""
    for name, spread in spreads.items():
        lost = [run.name for run in groups[name] if run.judged_loss is None]
        left_out = f"; without {', '.join(lost)}, which did not reach an end" if lost else ""
        yield f"{name}: {'no loss' if spread is None else describe_spread(spread)}{left_out}"
    if CANDIDATE in groups:
        yield describe_comparison(found, CANDIDATE, BASE)
    if "written_to" in result:
        yield f"written to {result['written_to']}"


def _as_json(
    groups: dict[str, list[StudyRun]],
    spreads: dict[str, SeedSpread | None],
    found: PairedComparison | None,
    source: dict[str, Any],
) -> dict[str, Any]:
    verdict = describe_comparison(found, CANDIDATE, BASE) if CANDIDATE in groups else None
    finite = None if found is None else _finite(asdict(found) | {"num_sds": found.num_sds})
    return {
        "kind": "noise",
        "source": source,
        "runs": {name: [run.summary() for run in runs] for name, runs in groups.items()},
        "spread": {name: asdict(spread) if spread else None for name, spread in spreads.items()},
        "comparison": finite,
        "verdict": verdict,
    }


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the t of differences that are all equal."""
    return {name: str(value) if value in (float("inf"), float("-inf")) else value for name, value in figures.items()}
