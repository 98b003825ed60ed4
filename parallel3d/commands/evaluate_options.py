"""Checks of the options of `parallel3d evaluate`, and those on which results depend. No torch."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel3d.commands.parsers import make_parser
from parallel3d.errors import ConfigError, Problem, UserError

OF_TEXTS = ("files", "last_word", "window", "stride", "text_column", "slice", "by", "tokens", "set")
OF_TASKS = ("tasks", "task_path", "limit", "fewshot")
SETTINGS = (*OF_TEXTS, *OF_TASKS, "tokenizer", "dtype")
"""Options that change results by more than rounding."""


def check_options(options: argparse.Namespace) -> None:
    """Raises UserError for options that exclude each other."""
    of_run = {"--slice": options.slice, "--by": options.by, "--tokens": options.tokens, "--set": options.set}
    of_files = {"--window": options.window, "--stride": options.stride, "--last-word": options.last_word}
    of_tasks = {"--task-path": options.task_path, "--limit": options.limit, "--fewshot": options.fewshot}
    excluded: dict[str, Any]
    if options.tasks:
        unused = {"FILE": options.files, "--stride": options.stride, "--last-word": options.last_word}
        excluded, what = {**of_run, **unused}, "with --tasks"
    elif options.files:
        excluded, what = {**of_run, **of_tasks}, "with files"
    else:
        excluded, what = {**of_files, **of_tasks}, "on a run's held-out text: name files"
    if given := [name for name, value in excluded.items() if value]:
        raise UserError(f"{given[0]} has no effect {what}")
    if options.last_word and options.stride:
        raise UserError("--stride has no effect with --last-word")
    if options.stride and options.window and options.stride > options.window:
        raise UserError(f"--stride {options.stride}: is more than --window {options.window}")
    if options.slice == "seen" and (options.by or options.tokens):
        raise UserError("--slice seen is what the run's evaluations read, undivided: use --slice unseen or all")


def check_following(options: argparse.Namespace) -> None:
    """Raises UserError for what --follow and --history exclude, or need."""
    if options.at is not None:
        return  # one checkpoint, for a process that follows the run
    if options.follow and options.history:
        raise UserError("--follow and --history exclude each other")
    if not options.follow and (options.every_tokens or options.name):
        raise UserError(f"{'--every-tokens' if options.every_tokens else '--name'} has no effect without --follow")
    if options.follow and (options.out or options.json):
        raise UserError(f"{'--out' if options.out else '--json'} has no effect with --follow: results are in the run")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What results depend on, as JSON has it."""
    values = {name: getattr(options, name) for name in SETTINGS}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def default_name(options: argparse.Namespace) -> str:
    """The name of a set of texts or tasks."""
    return "tasks" if options.tasks else "files" if options.files else "held-out"


def parse_sets(folder: Path, sets: Mapping[str, str]) -> dict[str, argparse.Namespace]:
    """The options of each set of `evaluation.sets`; raises ConfigError for wrong ones, and for files that don't
    exist."""
    parser = make_parser("evaluate")
    found, problems = {}, []

    def refuse(message: str) -> None:
        raise UserError(message)

    parser.error = refuse  # type: ignore[assignment, method-assign]
    for name, text in sets.items():
        try:
            options = parser.parse_intermixed_args([str(folder), *shlex.split(text)])
            check_options(options)
            check_following(options)
            if options.follow or options.history or options.out or options.json:
                raise UserError("--follow, --history, --out and --json have no place here")
            for file in options.files:
                if not Path(file).exists() and not Path(file.partition("=")[2] or file).exists():
                    raise UserError(f"{file}: no such file")
            found[name] = options
        except (UserError, ValueError) as error:
            fix = "Give arguments that `parallel3d evaluate RUN` takes"
            problems.append(Problem(field=f"evaluation.sets.{name}", value=text, rule=str(error), fix=fix))
    if problems:
        raise ConfigError(problems)
    return found
