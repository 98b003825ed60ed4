"""Options and types of options that the parsers of several commands share; no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path

from parallel3d.config.json_file import is_hugging_face


def add_json(parser: argparse.ArgumentParser, instead_of: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print one JSON object instead of {instead_of}")


def count(text: str) -> int:
    """A positive number."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def source(text: str) -> Path | str:
    """A folder, or an address of a remote store."""
    return text if "://" in text else Path(text)


def file_of(config: str, overrides: Sequence[str]) -> str:
    """The path of a configuration: `config`, or a file that is made for it where it is a Hugging Face folder. Exits
    where that fails."""
    if not is_hugging_face(Path(config)):
        return config
    from parallel3d.commands.folder_config import write_folder_config  # imports torch, which completion does without
    from parallel3d.errors import UserError

    try:
        return str(write_folder_config(Path(config), overrides))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def positive(text: str) -> float:
    """A number above 0: neither nan nor infinite."""
    if not 0 < (value := _number(text)) < inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return value


def not_negative(text: str) -> float:
    """A number, 0 or above: neither nan nor infinite."""
    if not 0 <= (value := _number(text)) < inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number, 0 or above")
    return value


def _number(text: str) -> float:
    """nan where it is none."""
    try:
        return float(text)
    except ValueError:
        return nan


def seconds(text: str) -> float:
    """A positive number of seconds."""
    if not 0 < (value := float(text)) < inf:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
