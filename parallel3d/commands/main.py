"""The command `parallel3d`: `parallel3d train --config quickstart`, `parallel3d plan ...`, one module per command.

Every command has the same options and exit codes as its script under launch/ in a checkout. A command whose output is
no longer read (`parallel3d plan ... | head -3`) ends quietly, with code 141, as a program that SIGPIPE ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from parallel3d import __version__
from parallel3d.commands.parsers import make_parser
from parallel3d.errors import UserError

COMMANDS = {
    "train": "train a model; also adds workers to a run and drains them",
    "plan": "show the grid, the schedule, the memory and the predicted speed of a configuration",
    "preflight": "test saving and resuming with a run's configuration before a long run",
    "verify": "compare layouts with one process, as far as they differ",
    "prepare": "tokenize text before a run, train a tokenizer",
    "convert": "weights to and from Hugging Face folders",
    "generate": "continue prompts with a trained model",
    "evaluate": "measure a trained model on held-out text, files or tasks",
    "average": "average the weights of checkpoints",
    "report": "report on a run, finished or not",
    "watch": "show the figures of a run while it goes on",
    "track": "send a run's figures to Weights & Biases, MLflow, Trackio or TensorBoard",
    "upload": "copy a run's checkpoints to a remote store",
    "fetch": "fetch a checkpoint from a remote store",
    "goodput": "estimate how much of the time training keeps under failures",
    "tune-warmup": "find a sequence-length warmup by short runs",
    "find-batch": "find the largest micro-batch that fits into memory, by short runs",
    "study": "answer a question about a configuration by short runs: noise, precision, batch, layout, ...",
    "compare-dumps": "compare the dumps of two runs tensor by tensor",
    "configs": "list the configurations that come with the package, or print one",
    "doctor": "check this machine and environment, and say how to mend them",
    "completion": "print what completes this command in bash, zsh or fish",
    "demo": "train while workers are killed, and compare with an undisturbed run",
}
"""Name and purpose; module `parallel3d.commands.NAME`, with _ for -, holds `main(arguments) -> exit code`."""

EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `parallel3d ARGUMENTS` (default: those of this process); returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    return run(name, rest)


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs a command; returns its exit code, which is 141 where its standard output is closed."""
    try:
        try:
            return dispatch(name, list(arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not is_closed_pipe(1):
            raise  # another connection
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is written at the interpreter's end
        return EXIT_BROKEN_PIPE


def dispatch(name: str, arguments: list[str]) -> int:
    if name == "completion" and arguments[:1] == ["--words"]:  # a shell asks, between two keys
        print("\n".join(import_module("parallel3d.commands.completion").complete(arguments[1:] or [""])))
        return 0
    if name in ("", "-h", "--help", "help"):
        print(describe_commands())
        return 0
    if name == "--version":
        print(describe_version())
        return 0
    if name not in COMMANDS:
        print(f"parallel3d {name}: unknown command; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return UserError.exit_code
    if {"-h", "--help"} & set(arguments):
        make_parser(name).parse_args(arguments)  # exits, without the seconds that imports of torch take
    return int(import_module(f"parallel3d.commands.{name.replace('-', '_')}").main(arguments))


def is_closed_pipe(descriptor: int) -> bool:
    """Whether the file is a pipe or socket that has lost its reader."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


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
    from importlib.metadata import PackageNotFoundError, version  # takes longer than all other imports here

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"parallel3d {__version__} (torch {torch}, Python {'.'.join(map(str, sys.version_info[:3]))})"
