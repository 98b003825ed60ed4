"""Rehearses saving and resuming before a long run: `python launch/preflight.py --config FILE [section.field=value
...]`.

Four steps of the very run that the file describes, with a save at the third. The fourth is then repeated from that
checkpoint, by the same command as ever: on the same layout, where it must be the same bits, and on another one of as
many processes, where it must be as near as rounding explains. `launch/train.py --preflight` does this and, if all is
well, begins the run. Exit codes: 0 all is well, 1 something differs, otherwise that of the run which did not succeed.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d.checkpoint.compare_checkpoints import compare_checkpoints
from parallel3d.checkpoint.directory import CheckpointDirectory, read_index
from parallel3d.child_process import run_script
from parallel3d.config.command_line import config_parser, parse_config
from parallel3d.config.derived import world_size
from parallel3d.config.layouts import Layout, alternative_layouts, current_layout
from parallel3d.config.load import dump_config, load_config, resolve
from parallel3d.config.schema import CheckpointConfig, Config, DebugConfig, RandomFaults
from parallel3d.config.sections.restart import RestartConfig
from parallel3d.errors import CheckpointError, ConfigError, UserError
from parallel3d.inprocess.compare_runs import BITWISE, LargestDifference, Tolerance, tolerance_of
from parallel3d.monitor.run_folder import METRICS, read_metrics
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.main import choose_device

NUM_STEPS, SAVED_STEP = 4, 3
SCRATCH, LOCK, CHECKPOINTS = "preflight", ".lock", "checkpoints"
COLUMNS = ("loss", "gradient norm", "evaluation", "weights", "moments")
NUM_TAIL_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A short run: its folder in the scratch folder, and its configuration."""

    folder: Path
    config: Config

    @property
    def layout(self) -> str:
        return current_layout(self.config).name

    def checkpoint(self, step: int) -> Path:
        return CheckpointDirectory(self.folder / CHECKPOINTS).path_of(step)


@dataclass(frozen=True, kw_only=True)
class ResumeOutcome:
    """How near a resumed trial came, by column, and how near it had to."""

    trial: Trial
    differences: dict[str, LargestDifference]
    limits: dict[str, float]

    @property
    def findings(self) -> list[str]:
        """What is beyond the limit, in sentences."""
        return [
            f"{self.trial.layout}: {name} of {found.where} differ{'s' * (not name.endswith('s'))} by {found.value:.1e}"
            f" ({self.limits[name]:g} is allowed)"
            for name, found in self.differences.items()
            if found.value > self.limits[name]
        ]


class TrialFailed(Exception):
    """A short run ended with this exit code."""

    def __init__(self, code: int):
        self.code = code


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        config = resolve(load_config(options.config, options.overrides), config_path=options.config)
        with scratch_folder(Path(str(config.checkpoint.directory)) / SCRATCH) as scratch:
            return preflight(config, scratch)
    except TrialFailed as failure:
        return failure.code
    except KeyboardInterrupt:  # while it compared
        return 128 + signal.SIGINT
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = config_parser("Rehearse saving and resuming of a run, in four steps.")
    return parse_config(parser, arguments)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder where the run's checkpoints will be, on the same disk, and nothing of it afterwards."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in path.iterdir():  # by one that was killed
                if left.name != LOCK:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            logs_matter = False
            try:
                yield path
            except TrialFailed as failure:
                logs_matter = failure.code < 128  # it was not stopped
                raise
            finally:
                for folder in path.glob(f"*/{CHECKPOINTS}") if logs_matter else [path]:
                    shutil.rmtree(folder)
    except BlockingIOError:
        raise UserError(f"another preflight is under way in {path}") from None
    except OSError as error:
        raise UserError(f"can't preflight in {path} ({error.strerror})") from None


def preflight(config: Config, scratch: Path) -> int:
    """Runs and compares; 0 where everything is as near as it has to be."""
    reference = trial_of(config, scratch / "whole")
    same = trial_of(config, scratch / "same", resume=reference.checkpoint(SAVED_STEP))
    other = trial_on_other_layout(config, scratch / "other", resume=reference.checkpoint(SAVED_STEP))
    print_line(f"preflight: {NUM_STEPS} steps on {reference.layout}, a save after step {SAVED_STEP}, in {scratch}")
    run(reference)
    is_on_gpu = choose_device(config, 0, len(build_grid(config).ranks)).type == "cuda"  # where kernels add in any order
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
    print_line(
        "preflight: what was resumed is not the run that was saved" if failed else "preflight: all as it has to be"
    )
    return 1 if failed else 0


# --- what to run ------------------------------------------------------------------------------------------------------


def trial_of(config: Config, folder: Path, *, resume: Path | None = None, layout: Layout | None = None) -> Trial:
    """The first steps of the run that a resolved `config` describes, without what else it leaves on disk, and without
    its faults. Raises ConfigError where another layout does not fit it."""
    fields = config.model_dump()
    fields["run"] |= {"num_steps": NUM_STEPS, "num_tokens": None, "directory": str(folder), "resume": "never"}
    fields["run"] |= {"evaluate_every": None, "evaluate_share": None, "evaluate_at_start": False}
    fields["restart"] = RestartConfig().model_dump()
    fields["checkpoint"] = CheckpointConfig(every=SAVED_STEP, directory=str(folder / CHECKPOINTS)).model_dump()
    fields["elastic"] |= {"faults": [], "random_faults": RandomFaults().model_dump()}
    fields["debug"] = DebugConfig().model_dump()
    fields["parallel"] |= layout.fields if layout else {}
    trial = resolve(Config.model_validate(fields), config_path="")
    if resume is not None:  # a folder that is not there yet
        trial = trial.model_copy(update={"run": trial.run.model_copy(update={"resume": str(resume)})})
    return Trial(folder=folder, config=trial)


def trial_on_other_layout(config: Config, folder: Path, *, resume: Path) -> Trial | None:
    """The same on the first other layout that fits; None where none does."""
    for layout in alternative_layouts(config):
        with suppress(ConfigError):
            return trial_of(config, folder, resume=resume, layout=layout)
    return None


def run(trial: Trial) -> None:
    """Trains, as a person would; raises TrialFailed, once it has shown what the run has said."""
    file, log = (trial.folder.with_suffix(suffix) for suffix in (".json", ".log"))
    file.write_text(dump_config(trial.config))
    started = time.monotonic()
    with log.open("wb") as output:
        code = run_script(ROOT / "launch/train.py", ["--config", str(file)], output)
    if code:
        tail = log.read_text(errors="replace").splitlines()[-NUM_TAIL_LINES:]
        print_line(
            "\n".join([f"the preflight on {trial.layout} ended with exit code {code} ({log}):", *tail]), sys.stderr
        )
        raise TrialFailed(code)
    print_line(f"  {trial.layout}: {time.monotonic() - started:.1f} s")


def resume_and_compare(trial: Trial, reference: Trial, tolerance: Tolerance) -> ResumeOutcome:
    """Goes on from the save, and leaves nothing on disk but what is known then."""
    print_line(f"preflight: step {NUM_STEPS} anew from that checkpoint, on {trial.layout}")
    run(trial)
    outcome = ResumeOutcome(
        trial=trial,
        differences=compare(trial, reference, noise=tolerance.gradients),
        limits={
            "loss": tolerance.loss,
            "gradient norm": tolerance.gradients,
            "evaluation": tolerance.loss,
            "weights": tolerance.weights,
            "moments": 2 * tolerance.gradients,  # the second one is of squares
        },
    )
    shutil.rmtree(trial.folder)
    return outcome


# --- the result -------------------------------------------------------------------------------------------------------


def compare(ours: Trial, theirs: Trial, *, noise: float) -> dict[str, LargestDifference]:
    """The largest differences of the last step, by column."""
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
    """The last step's record, and the loss of the evaluation after it."""
    figures: dict[str, Any] = {}
    for line in read_metrics(folder / METRICS):
        if line.get("step") == NUM_STEPS and "event" not in line:
            figures |= line
        if line.get("step") == NUM_STEPS and line.get("event") == "evaluation":
            figures["evaluation"] = line["loss"]
    if "loss" not in figures:
        raise CheckpointError(f"the run in {folder} has not told of step {NUM_STEPS}")
    return figures


def relative_difference(ours: float | None, theirs: float | None) -> float:
    """|a - b| / |b|; null, which stands for what is not finite or not there, is as near to null as can be."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return abs(ours - theirs) / max(abs(theirs), 1e-30)


def draw_table(outcomes: Sequence[ResumeOutcome]) -> Iterator[str]:
    """A row for each layout with its largest differences, a row with what is allowed, and what is beyond it."""
    yield f"step {NUM_STEPS} against that of the run that was not interrupted, largest relative differences:"
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
    """What the run's checkpoints will take: those that are kept, the best, and the one that is being written."""
    needed, free = (config.checkpoint.keep_last + 2) * num_bytes, shutil.disk_usage(folder).free + 2 * num_bytes
    text = f"a checkpoint takes {num_bytes / 1e6:,.1f} MB, {config.checkpoint.keep_last + 2} of them at most"
    text += " beside those of checkpoint.keep_every" if config.checkpoint.keep_every else ""
    return f"{text}; {'only ' * (needed > free)}{free / 1e6:,.1f} MB are free in {folder.parent}"


def print_line(text: str, stream: Any = None) -> None:
    print(text, file=stream or sys.stdout, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
