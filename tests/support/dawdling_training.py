"""launch/train.py with slow steps, whose rank 1 waits in a phase until it is struck: FOLDER PHASE STEP HOSTS ARGUMENTS.

PHASE is one of the training loop's (trainer/loop.py), and STEP the one at which it begins; or PHASE is a recovery's
(trainer/recovery.py), the first one after STEP. HOSTS has a letter for each rank, where it thinks that it is, or is
"-". The files by which rank 1 and the test understand each other are those of member_processes.py, in FOLDER.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel3d.elastic.worker import process
from tests.support.member_processes import dawdle
from tests.support.processes import write_step

if TYPE_CHECKING:
    from parallel3d.trainer.loop import Phase
    from parallel3d.worker.hooks import WorkerHooks

TRAIN = Path(__file__).parents[2] / "launch" / "train.py"
STEP_S = 0.1


def main() -> None:
    folder, phase, step, hosts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if hosts != "-":
        socket.gethostname = lambda: hosts[int(os.environ["RANK"])]
    run_main = process.run_main

    def run_dawdling(log: Path, worker_main: process.WorkerMain, context: process.WorkerContext) -> int:
        slow_down(folder, phase, step, context)
        return run_main(log, worker_main, context)

    process.run_main = run_dawdling
    sys.argv = [str(TRAIN), *sys.argv[5:]]
    runpy.run_path(str(TRAIN), run_name="__main__")


def slow_down(folder: Path, phase: str, step: int, context: process.WorkerContext) -> None:
    """Changes what this worker does as it begins a phase; imports torch, which its ancestors need not."""
    from parallel3d.worker.hooks import WorkerHooks

    begin: Callable[..., Any] = WorkerHooks.begin
    enter_phase: Callable[..., Any] = WorkerHooks.enter_phase
    generations: dict[int, int] = {}
    """Of each step that this worker has begun."""

    def begin_slowly(hooks: WorkerHooks, coming: Phase, number: int) -> None:
        begin(hooks, coming, number)
        if coming.value == "step":
            generation = generations[number] = context.control.membership.membership_state()["committed_generation"]
            if number > step + 1 and generations.get(number - 1) == generation:  # that one was not struck, but made
                write_step(folder, context.rank, generation, number - 1)
            time.sleep(STEP_S)
        if context.rank == 1 and (coming.value, number) == (phase, step):
            dawdle(folder, context.rank, context.heartbeat.tick)

    def enter_slowly(hooks: WorkerHooks, coming: str) -> None:
        enter_phase(hooks, coming)
        if context.rank == 1 and coming == phase and (context.heartbeat.step or 0) > step:
            dawdle(folder, context.rank, context.heartbeat.tick)

    WorkerHooks.begin = begin_slowly  # type: ignore[method-assign]
    WorkerHooks.enter_phase = enter_slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
