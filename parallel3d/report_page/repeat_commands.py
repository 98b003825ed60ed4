"""The commands that repeat a run: that of its first leg, and that of the newest one after a resume. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

Json = Mapping[str, Any]
COMMAND_FACTS = ("command_line", "working_directory")
"""What environment.json has for them; relative paths of the command line start at the working directory."""


def repeat_commands(lines: Iterable[Json], environment: Json, first_environment: Json) -> tuple[tuple[str, str], ...]:
    """Captions and commands; () where none is known. A run that has begun at step 0 with its only leg needs no caption.

    `environment` is that of the newest leg; `first_environment` that of the first of several legs, {} if unknown.
    """
    steps = [int(line["step"]) for line in lines if line.get("event") == "started"]
    newest, first = describe_command(environment), describe_command(first_environment)
    if not newest:
        return ()
    if not steps or steps == [0]:
        return (("", newest),)
    which = f"The newest of {len(steps):,} legs" if len(steps) > 1 else "The only leg in this folder"
    resumed = f"{which}, which went on after step {steps[-1]:,}: this command alone does not make the whole run."
    if first:
        return ("The first leg:", first), (resumed, newest)
    return ((f"{resumed} The command of the first leg is not known.", newest),)


def describe_command(environment: Json) -> str:
    """The command line, after the change to its working directory where that is recorded; "" without one."""
    command = shlex.join(environment.get("command_line", ()))
    folder = environment.get("working_directory")
    return f"cd {shlex.quote(folder)}\n{command}" if command and folder else command
