"""The command `parallel3d`: `parallel3d train --config quickstart`, `parallel3d plan ...`, one module per command.

Every command has the same options and exit codes as its script under launch/ in a checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from parallel3d import __version__
from parallel3d.errors import UserError

COMMANDS = {
    "train": "train a model; also adds workers to a run and drains them",
    "plan": "show the grid, the schedule, the memory and the predicted speed of a configuration",
    "preflight": "test saving and resuming with a run's configuration before a long run",
    "verify": "compare layouts with one process, as far as they differ",
    "prepare": "tokenize text before a run, train a tokenizer",
    "convert": "weights to and from Hugging Face folders",
    "average": "average the weights of checkpoints",
    "report": "report on a run, finished or not",
    "goodput": "estimate how much of the time training keeps under failures",
    "tune-warmup": "find a sequence-length warmup by short runs",
    "compare-dumps": "compare the dumps of two runs tensor by tensor",
    "configs": "list the configurations that come with the package, or print one",
    "demo": "train while workers are killed, and compare with an undisturbed run",
}
"""Name and purpose; module `parallel3d.commands.NAME`, with _ for -, holds `main(arguments) -> exit code`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `parallel3d ARGUMENTS` (default: those of this process); returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("", "-h", "--help", "help"):
        print(describe_commands())
        return 0
    if name == "--version":
        print(describe_version())
        return 0
    if name not in COMMANDS:
        print(f"parallel3d {name}: unknown command; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return UserError.exit_code
    sys.argv[0] = f"parallel3d {name}"  # argparse shows it as the program's name
    run = import_module(f"parallel3d.commands.{name.replace('-', '_')}").main
    return int(run(rest))


def describe_commands() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: parallel3d COMMAND ...   (parallel3d COMMAND --help shows a command's options)",
            "",
            *(f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items()),
            "",
            "  --version: of parallel3d, torch and Python",
        ]
    )


def describe_version() -> str:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"parallel3d {__version__} (torch {torch}, Python {'.'.join(map(str, sys.version_info[:3]))})"
