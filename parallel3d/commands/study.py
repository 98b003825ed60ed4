"""Answers a question about a configuration by short real runs of it: `python launch/study.py KIND ...`.

    noise       how far seeds scatter the loss, and whether a changed configuration is better by more than that
    precision   the cheapest precision policy that is not worse beyond noise
    batch       the global batch with the lowest loss for the same tokens
    golden      whether a run's losses are those that were recorded
    scaling     whether a token costs as much on more hosts
    layout      the best layouts of `plan`, measured

Runs are kept below --out, with result.json; a study that was stopped continues with the same command, and finished runs
are not repeated. The decisions are in parallel3d/studies. Exit codes: 0 done, 1 a negative answer (golden: a loss
differs; precision: not even the reference reached its end), 2 invalid input, 130 stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from parallel3d.commands.parsers import parse
from parallel3d.commands.study_batch import study_batch
from parallel3d.commands.study_golden import study_golden
from parallel3d.commands.study_layout import study_layout
from parallel3d.commands.study_noise import study_noise
from parallel3d.commands.study_precision import study_precision
from parallel3d.commands.study_scaling import study_scaling
from parallel3d.errors import UserError

STUDIES: dict[str, Callable[[argparse.Namespace], int]] = {
    "noise": study_noise,
    "precision": study_precision,
    "batch": study_batch,
    "golden": study_golden,
    "scaling": study_scaling,
    "layout": study_layout,
}


def main(arguments: list[str]) -> int:
    options = parse("study", arguments)
    try:
        return STUDIES[options.kind](options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr)
        return 130
