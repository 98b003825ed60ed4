"""Runs a command of the project as a child process and forwards stop signals to it."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1
MAIN = Path(__file__).resolve().parent / "__main__.py"


def command_line(name: str, *arguments: str) -> list[str]:
    """What starts `parallel3d NAME ARGUMENTS` from any folder, installed or not."""
    return [sys.executable, str(MAIN), name, *arguments]


def end_with_parent() -> None:
    """Has this process killed as soon as the one that has started it ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_command(name: str, arguments: Sequence[str], output: IO[bytes] | None = None) -> int:
    """Runs `parallel3d NAME ARGUMENTS`, with its output on this process's or in a file; returns its exit code.

    The code is 128 + n if signal n has ended it, or was forwarded to it.
    """
    command = command_line(name, *arguments)
    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def forward_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, forward_signal) for number in STOP_SIGNALS}
    try:
        children.append(subprocess.Popen(command, stdout=output, stderr=output))
        if received:  # before the child existed
            children[0].send_signal(received[0])
        code = children[0].wait()  # bounded: a stop signal ends the child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        return 128 + received[0]
    return 128 - code if code < 0 else code
