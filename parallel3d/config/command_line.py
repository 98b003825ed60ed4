"""The command line that all tools share which read a run's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from parallel3d.config.shipped import find_config


def config_parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with `--config FILE`; a tool adds its own options, `parse_config` the overrides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--config",
        required=True,
        type=lambda name: str(find_config(name)),
        metavar="FILE",
        help="the run's JSON file, or a name that `parallel3d configs` lists",
    )
    return parser


def parse_config(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the options, and the `overrides` (section.field=value) between them; exits on any other word."""
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="replaces a field of the file")
    options = parser.parse_intermixed_args(arguments)
    if wrong := [override for override in options.overrides if "=" not in override]:
        parser.error(f"unknown argument: {' '.join(wrong)} (an override reads section.field=value)")
    return options
