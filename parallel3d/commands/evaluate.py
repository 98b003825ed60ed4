"""Measures a trained model: `parallel3d evaluate runs/quickstart`, `parallel3d evaluate MODEL wikitext.txt`.

Without files on the text that its run has held out; on files token by token, or by the last word of each passage;
with `--tasks` on tasks of lm-evaluation-harness. With `--follow` each checkpoint of a run as it comes, which
`evaluation.every_tokens` starts beside a run; with `--history` what was found. Exit codes: 0 done, 1 a followed
checkpoint could not be evaluated, 2 invalid input, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress

from parallel3d.child_process import end_with_parent
from parallel3d.commands.evaluate_options import check_following, check_options
from parallel3d.commands.evaluation_follower import follow
from parallel3d.commands.followed_run import RunByHand
from parallel3d.commands.parsers import parse
from parallel3d.errors import UserError
from parallel3d.evaluation.result_history import format_history, history_of
from parallel3d.evaluation.saved_results import EVALUATIONS, result_folders

EXIT_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    options = parse("evaluate", arguments)
    if options.at is not None:
        end_with_parent()
    try:
        check_options(options)
        check_following(options)
        if options.history:
            show_history(options)
        elif options.follow and options.at is None:
            code = follow(options, arguments)
            if options.sets is not None:
                with suppress(OSError):  # the run's process is gone
                    print("ended", flush=True)
            return code
        else:
            from parallel3d.commands.measure_model import evaluate  # imports torch, which a follower does not need

            evaluate(options)
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"can't read or write {error.filename} ({error.strerror})", file=sys.stderr)
        return UserError.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def show_history(options: argparse.Namespace) -> None:
    """Prints what evaluations of a run's checkpoints have found."""
    if not (folders := result_folders(options.source)):
        raise UserError(f"{options.source} has no {EVALUATIONS}/: --follow, or evaluation.every_tokens, writes them")
    history = history_of(folders, RunByHand(options.source).starts())
    print(json.dumps(history, indent=1, ensure_ascii=False) if options.json else format_history(history))
