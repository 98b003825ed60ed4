"""Options and types of options that the parsers of several commands share; no torch."""

from __future__ import annotations

import argparse
from pathlib import Path


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


def seconds(text: str) -> float:
    """A positive number of seconds."""
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
