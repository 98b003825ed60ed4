"""What the tools that read a run's configuration have in common on their command lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def config_parser(description: str) -> argparse.ArgumentParser:
    """`--config FILE`, to which a tool adds its own options; `parse_config` adds the overrides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's JSON file, see configs/")
    return parser


def parse_config(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with `overrides`, each section.field=value, from anywhere between them; exits on any other word."""
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="replaces a field of the file")
    options = parser.parse_intermixed_args(arguments)
    if wrong := [override for override in options.overrides if "=" not in override]:
        parser.error(f"unknown argument: {' '.join(wrong)} (an override reads section.field=value)")
    return options
