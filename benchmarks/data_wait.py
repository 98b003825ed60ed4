"""Measures the share of a step that waits for text, with real and with slow tokenizers.

`python benchmarks/data_wait.py` trains the quickstart and tokenises during the run, with the thread that reads ahead
and with a process; then it takes steps of a known length against tokenizers of a known slowness, which sleep or hold
Python's lock: a step should take the longer of the two, not their sum. `--steps` shortens the training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # computing uses one core, tokenising another

import numpy as np

from parallel3d.data.prefetch import Prefetcher
from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.data.reader_process import ReaderProcess
from parallel3d.parallel.abort import AbortToken

WARM_STEPS = 20
"""Steps that are left out: the corpus is opened and kernels are built."""
NUM_LANES = 4
DEPTH = 2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The share of a step that waits for text.")
    parser.add_argument("--steps", type=int, default=150, help="of the quickstart, for each number of processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1], help="data.num_processes")
    parser.add_argument("--step-ms", type=float, default=40.0, help="a step of the second table, computing")
    options = parser.parse_args(arguments)
    print("the quickstart      tokens/s   step      wait for text, median of a step   all steps")
    for count in options.processes:
        print(train(options.steps, count), flush=True)
    print("\nms a step           computing   tokenising   sum     measured: thread   process")
    for holds_lock in (False, True):
        for share in (0.5, 1.5):
            print(compare(Slow(options.step_ms * share / NUM_LANES / 1e3, holds_lock), options.step_ms), flush=True)


def train(num_steps: int, num_processes: int) -> str:
    """A row: the leader's metrics of a short quickstart, its first steps left out."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"run.num_steps={num_steps}", f"data.num_processes={num_processes}", f"run.directory={folder}/run"]
        command = [sys.executable, "launch/train.py", "--config", "configs/quickstart.json", *overrides]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line and line["step"] > min(WARM_STEPS, num_steps // 2)]
    shares = [step["data_wait_s"] / step["step_s"] for step in steps]
    whole = sum(step["data_wait_s"] for step in steps) / sum(step["step_s"] for step in steps)
    tokens, step_s = (median(step[name] for step in steps) for name in ("tokens_per_s", "step_s"))
    name = f"{num_processes} processes" if num_processes else "thread"
    return f"{name:<18} {tokens:9,.0f}   {1e3 * step_s:4.0f} ms   {median(shares):31.3%}   {whole:9.3%}"


@dataclass
class Slow(Reader):
    """Lanes whose tokenizer takes a given time, asleep or computing in Python."""

    seconds: float
    holds_lock: bool

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        until = time.perf_counter() + self.seconds
        if not self.holds_lock:
            time.sleep(self.seconds)
        while time.perf_counter() < until:
            pass
        epoch, document, offset = cursor
        return np.zeros(num_tokens + 1, np.int32), (epoch, document, offset + num_tokens)


def compare(reader: Slow, step_ms: float) -> str:
    """A row: milliseconds a step, computing and reading ahead at once."""
    token = AbortToken()
    by_thread = time_steps(Prefetcher(reader, DEPTH, token), step_ms)
    helper = ReaderProcess(partial(Slow, reader.seconds, reader.holds_lock), token)
    by_process = time_steps(Prefetcher(reader, DEPTH, token, [helper]), step_ms)
    tokenising = 1e3 * reader.seconds * NUM_LANES
    kind = "holds the lock" if reader.holds_lock else "sleeps"
    return (
        f"{kind:<18} {step_ms:10.0f}   {tokenising:10.0f}   {step_ms + tokenising:3.0f}"
        f"   {by_thread:16.1f}   {by_process:7.1f}"
    )


def time_steps(prefetcher: Prefetcher, step_ms: float, num_steps: int = 30) -> float:
    """Median milliseconds of a step: reads of all lanes, then as much computing as `step_ms` take alone."""
    num_products = products_in(step_ms)
    cursors = [prefetcher.start(lane) for lane in range(NUM_LANES)]
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        cursors = [prefetcher.read(lane, cursor, 128)[1] for lane, cursor in enumerate(cursors)]
        compute(num_products)
        times.append(1e3 * (time.perf_counter() - started))
    prefetcher.close()
    return median(times[num_steps // 3 :])


def products_in(milliseconds: float) -> int:
    compute(20)
    started = time.perf_counter()
    compute(100)
    return max(1, round(100 * milliseconds / (1e3 * (time.perf_counter() - started))))


def compute(num_products: int) -> None:
    """Matrix products, which release Python's lock, each called from Python, as a step's kernels are."""
    matrix = np.ones((96, 96), np.float32)
    for _ in range(num_products):
        matrix @ matrix


if __name__ == "__main__":
    from benchmarks import data_wait  # by its name, so that the process finds Slow, too

    data_wait.main()
