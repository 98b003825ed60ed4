"""Finds a sequence-length warmup by short runs: `python launch/tune_warmup.py --config FILE [section.field=value]`.

The search follows "Sequence Length Warmup" (Li et al. 2022): first the initial length, then the longest duration at
which the validation perplexity does not fluctuate (parallel3d/monitor/tuning.py). Each short run is the start of the
configured run, with the same learning rates, in a folder of its own under --out; a repeated search reuses finished
runs. The result is printed as lines for the configuration. Exit codes: 0 found, 1 every candidate fluctuates, 2 invalid
input, 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel3d.child_process import command_line
from parallel3d.commands.parsers import parse
from parallel3d.config.derived import tokens_per_step
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.sections.warmup import WarmupConfig
from parallel3d.config.warmup_builder import run_length
from parallel3d.errors import EXIT_DIVERGED, ConfigError, Problem, UserError
from parallel3d.monitor.run_folder import METRICS, read_metrics
from parallel3d.monitor.tuning import (
    Fluctuation,
    SearchResult,
    SearchSpace,
    ShortRun,
    ShortRunEvaluation,
    search_warmup,
)

EVALUATIONS_PER_SHORT_RUN = 25


def main(arguments: list[str]) -> int:
    options = parse("tune-warmup", arguments)
    try:
        config = resolve(load_config(options.config, options.overrides), config_path=options.config)
        search = plan_search(config, options)
        out = Path(options.out or f"runs/{Path(options.config).stem}-warmup")
        runner = ShortRunner(config, options.config, options.overrides, search, out)
        report(describe(search, config, out))
        result = search_warmup(search, runner, runner.report)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        report("stopped; the same command continues from here")
        return 130
    report(describe_outcome(result))
    return 0 if result.duration else 1


# --- what is tried ----------------------------------------------------------------------------------------------------


def plan_search(config: Config, options: argparse.Namespace) -> SearchSpace:
    """Durations are multiples of a few learning-rate warmups, and so is the length of a short run."""
    lr_schedule, full = config.lr_schedule, config.batch.sequence_length
    warmup_steps = lr_schedule.warmup_steps or -(-(lr_schedule.warmup_tokens or 0) // tokens_per_step(config))
    if not warmup_steps:
        rule, fix = "the search is in multiples of the learning rate's warmup", "Give one, such as 100 updates"
        raise ConfigError([Problem(field="lr_schedule.warmup_steps", value=0, rule=rule, fix=fix)])
    unit = options.multiple * warmup_steps
    without = config.model_copy(update={"warmup": WarmupConfig()})
    longest = max(unit, options.max_duration or run_length(without).num_steps // 2)
    step = config.warmup.sequence_length.multiple
    starts = options.starts or [step * 2**number for number in range(full.bit_length()) if step * 2**number < full]
    if not starts:
        rule, fix = f"leaves no shorter length that is a multiple of {step}", "No search is needed"
        raise ConfigError([Problem(field="batch.sequence_length", value=full, rule=rule, fix=fix)])
    return SearchSpace(
        starts=starts,
        durations=list(range(unit, longest + 1, unit)),
        start_run_steps=warmup_steps,
        duration_run_steps=unit,
        tolerance=options.tolerance,
    )


def describe(search: SearchSpace, config: Config, out: Path) -> str:
    starts, durations = search.starts, search.durations
    return (
        f"lengths from {starts[0]} to {starts[-1]}, of {search.start_run_steps:,} steps each, to the first stable;\n"
        f"then durations from {durations[0]:,} to {durations[-1]:,} steps in steps of {durations[0]:,}, of"
        f" {search.duration_run_steps:,} steps each: at most {search.max_short_runs} short runs in {out}\n"
        f"full length {config.batch.sequence_length}; a fluctuation is a validation perplexity above"
        f" {search.tolerance:g} x the best one before"
    )


def describe_outcome(result: SearchResult) -> str:
    if result.duration is None:
        advice = "lower the learning rate, shrink the batch, or raise --tolerance"
        return f"no stable warmup: {result.reason}; {advice}"
    chosen = {"kind": "linear", "start": result.start, "duration": result.duration}
    section = json.dumps({"warmup": {"sequence_length": chosen}}, indent=2)
    return f"start {result.start}, duration {result.duration:,} ({result.reason}); for the configuration:\n{section}"


def report(text: str) -> None:
    print(text, flush=True)


# --- short runs -------------------------------------------------------------------------------------------------------


class ShortRunner:
    """Runs short runs with launch/train.py, one after the other; finished ones in `out` are read instead."""

    def __init__(self, config: Config, path: str, overrides: Sequence[str], search: SearchSpace, out: Path):
        self._config = config
        self._path = path
        self._overrides = list(overrides)
        self._search = search
        self._out = out
        self._count = 0

    def __call__(self, short_run: ShortRun) -> list[ShortRunEvaluation]:
        """The evaluations of a short run. Raises UserError if the run fails, except by diverging."""
        folder = self._out / f"start{short_run.start}-duration{short_run.duration}-steps{short_run.num_steps}"
        settings = self._settings(short_run, folder)
        done, request = folder.with_suffix(".json"), {"settings": settings, "overrides": self._overrides}
        if done.exists() and (saved := json.loads(done.read_text()))["request"] == request:
            return [ShortRunEvaluation(**evaluation) for evaluation in saved["evaluations"]]
        evaluations = self._train(settings, folder, short_run)
        record = {"request": request, "evaluations": [asdict(evaluation) for evaluation in evaluations]}
        done.write_text(json.dumps(record, indent=2) + "\n")
        return evaluations

    def report(self, short_run: ShortRun, fluctuation: Fluctuation | None) -> None:
        self._count += 1
        result = "calm" if fluctuation is None else str(fluctuation)
        progress = f"{self._count} (of at most {self._search.max_short_runs})"
        settings = f"start {short_run.start}, duration {short_run.duration:,}, {short_run.num_steps:,} steps"
        report(f"run {progress}: {settings}: {result}")

    def _settings(self, short_run: ShortRun, folder: Path) -> dict[str, Any]:
        """The overrides of a short run: the warmup, and the number of steps at unchanged learning rates."""
        lr_schedule = self._config.lr_schedule
        return {
            "warmup.sequence_length": {
                **self._config.warmup.sequence_length.model_dump(),
                "kind": "linear",
                "unit": "steps",
                "start": short_run.start,
                "duration": short_run.duration,
            },
            "lr_schedule.decay_steps": lr_schedule.decay_steps,
            "lr_schedule.decay_tokens": lr_schedule.decay_tokens,
            "run.num_steps": short_run.num_steps,
            "run.num_tokens": None,
            "run.evaluate_every": max(1, short_run.num_steps // EVALUATIONS_PER_SHORT_RUN),
            "run.resume": "never",
            "run.directory": str(folder),
            "checkpoint.every": None,
            "checkpoint.save_at_end": False,
            "checkpoint.upload": None,
            "checkpoint.upload_keep_last": None,
            "monitor.trackers": [],
            "restart.max_restarts": 0,
        }

    def _train(self, settings: dict[str, Any], folder: Path, short_run: ShortRun) -> list[ShortRunEvaluation]:
        overrides = [*self._overrides, *(f"{name}={json.dumps(value)}" for name, value in settings.items())]
        command = command_line("train", "--config", self._path, *overrides)
        log = folder.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                code = process.wait()  # bounded: a run of a few steps
            except KeyboardInterrupt:
                process.wait()  # bounded: Ctrl-C reaches the run, too, and ends it after its step
                raise
        if code not in (0, EXIT_DIVERGED):
            raise UserError(f"the run in {folder} ended with code {code}:\n{log.read_text()[-2000:]}")
        evaluations = [
            ShortRunEvaluation(step=line["step"], loss=line["loss"])
            for line in read_metrics(folder / METRICS)
            if line.get("event") == "evaluation"
        ]
        if code == EXIT_DIVERGED:
            evaluations.append(ShortRunEvaluation(step=short_run.num_steps, loss=None))
        if not evaluations:
            raise UserError(f"the run in {folder} has no evaluation: raise data.validation_fraction, or give more text")
        return evaluations
