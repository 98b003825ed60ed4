"""Tests saving and resuming before a long run: `python launch/preflight.py --config FILE [section.field=value ...]`.

Runs four steps of the configured run, with a save after the third. Then repeats the fourth from that checkpoint with
the real command: on the same layout, where it must be bitwise equal, and on another layout of at most as many
processes, where it must be equal up to rounding. `launch/train.py --preflight` does this first and then starts the run.
Exit codes: 0 passed, 1 a resumed run differs, otherwise that of the run that failed.
"""

from __future__ import annotations

import fcntl
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.compare_checkpoints import compare_checkpoints
from parallel3d.checkpoint.directory import CheckpointDirectory, read_index
from parallel3d.child_process import run_command
from parallel3d.commands.parsers import parse
from parallel3d.commands.short_runs import short_run_fields
from parallel3d.comparison.compare_runs import BITWISE, LargestDifference, tolerance_of
from parallel3d.config.derived import world_size
from parallel3d.config.layouts import Layout, alternative_layouts, current_layout
from parallel3d.config.load import dump_config, load_config, resolve
from parallel3d.config.schema import CheckpointConfig, Config
from parallel3d.config.specs.policies import Tolerance
from parallel3d.errors import CheckpointError, ConfigError, UserError
from parallel3d.monitor.run_folder import METRICS, read_metrics
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.device import choose_device

NUM_STEPS, SAVED_STEP = 4, 3
SCRATCH, LOCK, CHECKPOINTS = "preflight", ".lock", "checkpoints"
COLUMNS = ("loss", "gradient norm", "evaluation", "weights", "moments")
NUM_TAIL_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A short run: its directory in the scratch directory, and its configuration."""

    folder: Path
    config: Config

    @property
    def layout(self) -> str:
        return current_layout(self.config).name

    def checkpoint(self, step: int) -> Path:
        return CheckpointDirectory(self.folder / CHECKPOINTS).path_of(step)


@dataclass(frozen=True, kw_only=True)
class ResumeOutcome:
    """The differences of a resumed trial, by column, and their limits."""

    trial: Trial
    differences: dict[str, LargestDifference]
    limits: dict[str, float]

    @property
    def findings(self) -> list[str]:
        """Sentences on the differences beyond their limits."""
        return [
            f"{self.trial.layout}: {name} of {found.where} {'differ' if name.endswith('s') else 'differs'} by"
            f" {found.value:.1e} ({self.limits[name]:g} is allowed)"
            for name, found in self.differences.items()
            if found.value > self.limits[name]
        ]


class TrialFailed(Exception):
    """A short run failed with this exit code."""

    def __init__(self, code: int):
        self.code = code


def main(arguments: list[str]) -> int:
    options = parse("preflight", arguments)
    try:
        config = resolve(load_config(options.config, options.overrides), config_path=options.config)
        with scratch_folder(Path(str(config.checkpoint.directory)) / SCRATCH) as scratch:
            return preflight(config, scratch)
    except TrialFailed as failure:
        return failure.code
    except KeyboardInterrupt:  # during a comparison
        return 128 + signal.SIGINT
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty directory on the checkpoints' disk, removed afterwards; after a failure its logs stay."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in path.iterdir():  # of a preflight that was killed
                if leftover.name != LOCK:
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            keeps_logs = False
            try:
                yield path
            except TrialFailed as failure:
                keeps_logs = failure.code < 128  # not stopped by a signal
                raise
            finally:
                for folder in path.glob(f"*/{CHECKPOINTS}") if keeps_logs else [path]:
                    shutil.rmtree(folder)
    except BlockingIOError:
        raise UserError(f"another preflight is running in {path}") from None
    except OSError as error:
        raise UserError(f"can't run a preflight in {path} ({error.strerror})") from None


def preflight(config: Config, scratch: Path) -> int:
    """Runs and compares; returns 0 if all differences are within their limits."""
    reference = trial_of(config, scratch / "whole")
    same = trial_of(config, scratch / "same", resume=reference.checkpoint(SAVED_STEP))
    other = trial_on_other_layout(config, scratch / "other", resume=reference.checkpoint(SAVED_STEP))
    print_line(f"preflight: {NUM_STEPS} steps on {reference.layout}, a save after step {SAVED_STEP}, in {scratch}")
    run(reference)
    is_on_gpu = choose_device(config, 0, len(build_grid(config).ranks)).type == "cuda"  # kernels sum in any order
    allowed = tolerance_of(config, tp_size=config.parallel.tp_size) if is_on_gpu else BITWISE
    outcomes = [resume_and_compare(same, reference, allowed)]
    if other is None:
        print_line("preflight: no other layout of at most as many processes fits this configuration")
    else:
        tolerance = tolerance_of(other.config, tp_size=config.parallel.tp_size)
        outcomes.append(resume_and_compare(other, reference, tolerance))
    for line in draw_table(outcomes):
        print_line(line)
    print_line(describe_disk(config, read_index(reference.checkpoint(SAVED_STEP)).num_bytes, scratch))
    failed = any(outcome.findings for outcome in outcomes)
    print_line("preflight failed: the resumed run differs from the saved one" if failed else "preflight passed")
    return 1 if failed else 0


# --- what to run ------------------------------------------------------------------------------------------------------


def trial_of(config: Config, folder: Path, *, resume: Path | None = None, layout: Layout | None = None) -> Trial:
    """Returns the first steps of the run of a resolved `config`, without its other files and its faults.

    Raises ConfigError if `layout` does not fit.
    """
    checkpoint = CheckpointConfig(every=SAVED_STEP, directory=str(folder / CHECKPOINTS))
    fields = short_run_fields(config, folder, num_steps=NUM_STEPS, checkpoint=checkpoint)
    fields["parallel"] |= layout.fields if layout else {}
    trial = resolve(Config.model_validate(fields), config_path="")
    if resume is not None:  # not validated: the directory does not exist yet
        trial = trial.model_copy(update={"run": trial.run.model_copy(update={"resume": str(resume)})})
    return Trial(folder=folder, config=trial)


def trial_on_other_layout(config: Config, folder: Path, *, resume: Path) -> Trial | None:
    """Returns the trial on the first other layout that fits; None if none does."""
    for layout in alternative_layouts(config):
        with suppress(ConfigError):
            return trial_of(config, folder, resume=resume, layout=layout)
    return None


def run(trial: Trial) -> None:
    """Trains with the real command; on failure prints the end of its log and raises TrialFailed."""
    file, log = (trial.folder.with_suffix(suffix) for suffix in (".json", ".log"))
    file.write_text(dump_config(trial.config))
    started = time.monotonic()
    with log.open("wb") as output:
        code = run_command("train", ["--config", str(file)], output)
    if code:
        tail = log.read_text(errors="replace").splitlines()[-NUM_TAIL_LINES:]
        print_line(
            "\n".join([f"the preflight on {trial.layout} failed with exit code {code} ({log}):", *tail]), sys.stderr
        )
        raise TrialFailed(code)
    print_line(f"  {trial.layout}: {time.monotonic() - started:.1f} s")


def resume_and_compare(trial: Trial, reference: Trial, tolerance: Tolerance) -> ResumeOutcome:
    """Resumes from the save and compares with the reference; deletes the trial's files."""
    print_line(f"preflight: repeating step {NUM_STEPS} from that checkpoint on {trial.layout}")
    run(trial)
    outcome = ResumeOutcome(
        trial=trial,
        differences=compare(trial, reference, noise=tolerance.gradients),
        limits={
            "loss": tolerance.loss,
            "gradient norm": tolerance.gradients,
            "evaluation": tolerance.loss,
            "weights": tolerance.weights,
            "moments": 2 * tolerance.gradients,  # the second moment is of squares
        },
    )
    shutil.rmtree(trial.folder)
    return outcome


# --- the result -------------------------------------------------------------------------------------------------------


def compare(ours: Trial, theirs: Trial, *, noise: float) -> dict[str, LargestDifference]:
    """Returns the largest differences of the last step, by column."""
    mine, right = (last_metrics(trial.folder) for trial in (ours, theirs))
    metric_differences = {
        name: LargestDifference(value=relative_difference(mine.get(key), right.get(key)), where=f"step {NUM_STEPS}")
        for name, key in (("loss", "loss"), ("gradient norm", "grad_norm"), ("evaluation", "evaluation"))
    }
    checkpoints = (trial.checkpoint(NUM_STEPS) for trial in (ours, theirs))
    tensors = sorted(compare_checkpoints(*checkpoints, noise=noise), key=lambda each: each.relative)
    weight = [each for each in tensors if each.is_weight][-1]
    moment = [each for each in tensors if not each.is_weight][-1]
    return {
        **metric_differences,
        "weights": LargestDifference(value=weight.relative, where=weight.tensor),
        "moments": LargestDifference(value=moment.relative, where=moment.tensor),
    }


def last_metrics(folder: Path) -> dict[str, Any]:
    """Returns the last step's record, with the loss of the evaluation after it."""
    figures: dict[str, Any] = {}
    for line in read_metrics(folder / METRICS):
        if line.get("step") == NUM_STEPS and "event" not in line:
            figures |= line
        if line.get("step") == NUM_STEPS and line.get("event") == "evaluation":
            figures["evaluation"] = line["loss"]
    if "loss" not in figures:
        raise CheckpointError(f"the run in {folder} has no record of step {NUM_STEPS}")
    return figures


def relative_difference(ours: float | None, theirs: float | None) -> float:
    """Returns |a - b| / |b|; None (not finite, or missing) equals None and differs infinitely from a number."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return abs(ours - theirs) / max(abs(theirs), 1e-30)


def draw_table(outcomes: Sequence[ResumeOutcome]) -> Iterator[str]:
    """Yields a row per layout with its largest differences, a row with their limits, and the findings."""
    yield f"largest relative differences of step {NUM_STEPS} from the uninterrupted run:"
    rows = [["layout", "ranks", *COLUMNS, ""]]
    for outcome in outcomes:
        found = [f"{outcome.differences[name].value:.1e}".replace("0.0e+00", "0") for name in COLUMNS]
        limits = [f"{outcome.limits[name]:g}" for name in COLUMNS]
        layout, ranks = outcome.trial.layout, str(world_size(outcome.trial.config))
        rows.append([layout, ranks, *found, "DIFFERS" if outcome.findings else "ok"])
        rows.append(["  allowed", "", *limits, ""])
    widths = [max(map(len, column)) for column in zip(*rows)]
    yield from ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
    yield from (finding for outcome in outcomes for finding in outcome.findings)


def describe_disk(config: Config, num_bytes: int, folder: Path) -> str:
    """Describes the disk space of the run's checkpoints: those kept, the best, and the one being written."""
    needed, free = (config.checkpoint.keep_last + 2) * num_bytes, shutil.disk_usage(folder).free + 2 * num_bytes
    text = f"a checkpoint takes {num_bytes / 1e6:,.1f} MB; at most {config.checkpoint.keep_last + 2} are kept"
    text += " in addition to those of checkpoint.keep_every" if config.checkpoint.keep_every else ""
    return f"{text}; {'only ' if needed > free else ''}{free / 1e6:,.1f} MB are free in {folder.parent}"


def print_line(text: str, stream: Any = None) -> None:
    print(text, file=stream or sys.stdout, flush=True)
