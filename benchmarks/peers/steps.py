"""The steps of a peer's script: a line with the time of each, and a stop after it where contestants take turns."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable

STOP_VARIABLE = "BENCHMARK_STOPS_AFTER_STEPS"
"""In the environment: each process stops itself after each step, until SIGCONT."""


def report_steps(num_steps: int, run_step: Callable[[int], float]) -> None:
    """Runs the steps; `run_step` returns the loss."""
    for step in range(num_steps):
        started = time.perf_counter()
        loss = run_step(step)
        report_step(time.perf_counter() - started, loss)


def report_step(seconds: float, loss: float = math.nan) -> None:
    """Prints `STEP <seconds> <loss>`."""
    print(f"STEP {seconds:.6f} {loss:.4f}", flush=True)
    if os.environ.get(STOP_VARIABLE):
        os.kill(os.getpid(), signal.SIGSTOP)
