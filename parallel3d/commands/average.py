"""Averages the weights of checkpoints: `python launch/average.py --last 2 --checkpoints FOLDER --out FOLDER`.

The checkpoints, named one by one or the last N of a run, are of one model; layouts and precisions may differ. Sums are
in fp64, rounded once to fp32. The result is a checkpoint of weights only. Exit codes: 0 done, 2 invalid arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from parallel3d.checkpoint.average import average
from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.fetch import local_checkpoint
from parallel3d.commands.parsers import make_parser, parse
from parallel3d.config.load import CACHE_DIRECTORY
from parallel3d.errors import UserError


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        folders = choose_checkpoints(options)
        index = average(folders, options.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"can't write {options.out} ({error.strerror})", file=sys.stderr)
        return UserError.exit_code
    print(f"the mean of {len(folders)} checkpoints: {', '.join(map(str, folders))}")
    print(f"written to {options.out}: {index.num_bytes / 1e6:,.1f} MB, weights in fp32")
    print(f"start a run with them: run.initialize_from={options.out}")
    return 0


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    options = parse("average", arguments)
    error = make_parser("average").error
    if bool(options.named) == bool(options.checkpoints) or (options.last is None) != (options.checkpoints is None):
        error("give either checkpoint folders, or --last N with --checkpoints FOLDER")
    if options.last is not None and options.last < 1:
        error("--last must be at least 1")
    return options


def choose_checkpoints(options: argparse.Namespace) -> list[Path]:
    """The folders to average. Raises UserError when there are too few, or the same one twice."""
    if options.named:
        found = (local_checkpoint(named, CACHE_DIRECTORY) for named in options.named)
        folders = [folder.resolve() for folder in found]  # links such as latest and best
        if len(set(folders)) < len(folders):
            raise UserError(f"the same checkpoint twice: {', '.join(map(str, options.named))}")
        return folders
    checkpoint_dir = CheckpointDirectory(options.checkpoints)
    steps = checkpoint_dir.steps()
    if len(steps) < options.last:
        there = ", ".join(checkpoint_dir.path_of(step).name for step in steps) or "none"
        raise UserError(f"{options.checkpoints} holds fewer than {options.last} checkpoints: {there}")
    return [checkpoint_dir.path_of(step).resolve() for step in steps[-options.last :]]
