"""The results of a run's checkpoints in its folder, and which checkpoint is to be evaluated next. No torch.

    <run>/evaluations/<name>/step-00000200.json   what `parallel3d evaluate` wrote about the checkpoint of step 200
    <run>/evaluations/<name>/settings.json        what all of them were evaluated on

A result belongs to the checkpoint that was saved at its time: a run that goes on from an earlier step leaves its later
results behind, and a new checkpoint of the same step is evaluated again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import CheckpointDirectory, read_index
from parallel3d.checkpoint.index import INDEX
from parallel3d.errors import CheckpointError, UserError

EVALUATIONS, SETTINGS = "evaluations", "settings.json"
CLOCK_S = 1.0
"""Times of checkpoints are in whole seconds."""

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A checkpoint: its step, the tokens trained until then, and when it was saved, as its index has it."""

    step: int
    tokens: int
    saved_at: str


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """A start or restart of a run: when (seconds since 1970), and the step from which it went on."""

    time_s: float
    step: int


KnownSteps = dict[int, tuple[int, SavedStep]]
"""By step: when its index was written (ns), and what it says."""


def plan_evaluations_of(
    saved: Sequence[SavedStep],
    *,
    every_tokens: int,
    done: Collection[SavedStep],
    failed: Collection[SavedStep],
    is_last_due: bool,
) -> list[SavedStep]:
    """The checkpoints to evaluate, in the order of their tokens: of each interval of `every_tokens` that has no result
    the first that has not failed; with `is_last_due` also the last one, wherever it is."""
    evaluated = {each.tokens // every_tokens for each in done}
    due = []
    ordered = sorted(saved, key=lambda each: each.tokens)
    for each in ordered:
        interval = each.tokens // every_tokens
        is_next = interval > 0 and interval not in evaluated
        if each in done or each in failed or not (is_next or (is_last_due and each is ordered[-1])):
            continue
        due.append(each)
        evaluated.add(interval)
    return due


def is_left_behind(saved: SavedStep, starts: Iterable[RunStart]) -> bool:
    """Whether the run has gone on from an earlier step since the checkpoint was saved."""
    saved_s = datetime.fromisoformat(saved.saved_at).timestamp()
    return any(start.step < saved.step and start.time_s >= saved_s + CLOCK_S for start in starts)


def starts_of(lines: Iterable[Mapping[str, Any]]) -> list[RunStart]:
    """The starts and restarts among lines of metrics.jsonl."""
    return [
        RunStart(time_s=float(line["time"]), step=int(line["step"]))
        for line in lines
        if line.get("event") in ("started", "restart")
    ]


def find_saved(directory: CheckpointDirectory, known: KnownSteps) -> KnownSteps:
    """The checkpoints in a directory by step, each with the time of its index, by which `known` ones are not read
    again."""
    found: KnownSteps = {}
    for step in directory.steps():
        folder = directory.path_of(step)
        with suppress(OSError, CheckpointError):  # removed meanwhile, or damaged
            changed_ns = (folder / INDEX).stat().st_mtime_ns
            if step in known and known[step][0] == changed_ns:
                found[step] = known[step]
                continue
            index = read_index(folder)
            tokens = int(index.facts.state.get("tokens_trained", 0))
            found[step] = (changed_ns, SavedStep(step=step, tokens=tokens, saved_at=index.created_at))
    return found


class ResultFolder:
    """The results of one set of texts or tasks."""

    def __init__(self, run_folder: Path, name: str):
        self.name, self.path = name, run_folder / EVALUATIONS / name

    def prepare(self, settings: Mapping[str, Any]) -> None:
        """Creates the folder; raises UserError as `check` does."""
        self.check(settings)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raises UserError if the folder has results of other settings, which no table could compare."""
        path, asked = self.path / SETTINGS, json.loads(json.dumps(settings))
        if path.exists() and json.loads(path.read_text()) != asked:
            raise UserError(f"{self.path} has results of other settings: choose another name, or remove the folder")

    def path_of(self, step: int) -> Path:
        return self.path / f"step-{step:08}.json"

    def publish(self, written: Path, step: int) -> Report:
        """Gives a result that was written here its name; returns it."""
        report: Report = json.loads(written.read_text(encoding="utf-8"))
        os.replace(written, self.path_of(step))
        return report

    def reports(self, starts: Iterable[RunStart] = ()) -> dict[SavedStep, Report]:
        """The results by checkpoint, ascending, without those that the run has left behind.

        Raises UserError naming a file that is damaged.
        """
        starts, found = [*starts], {}
        for path in sorted(self.path.glob("step-*.json")):
            try:
                report = json.loads(path.read_text(encoding="utf-8"))
                model, _ = report["model"], report["results"]
                saved = SavedStep(step=model["step"], tokens=model["tokens"], saved_at=model["saved_at"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                fix = "remove it, and its checkpoint can be evaluated again"
                raise UserError(f"{path} is not the result of an evaluation ({error!r}): {fix}") from None
            if not is_left_behind(saved, starts):
                found[saved] = report
        return dict(sorted(found.items(), key=lambda pair: pair[0].step))


def result_folders(run_folder: Path) -> list[ResultFolder]:
    """Those that exist in a run's folder."""
    paths = sorted((run_folder / EVALUATIONS).glob(f"*/{SETTINGS}"))
    return [ResultFolder(run_folder, path.parent.name) for path in paths]
