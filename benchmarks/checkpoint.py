"""Measures the cost of a save for a run, and how fast it is written.

`python benchmarks/checkpoint.py [--hidden-size 1024] [--saves 5] [--out FILE]`, one process and one model (200M
parameters as it is by default, 12 bytes each on disk), in one run:

    plain    the median step while nothing is written
    ours     during training: the seconds of the snapshot's copy, for which training waits; the median step while the
             save is written, in seconds and in plain steps; MB/s of the writing; the largest resident memory above that
             before the copy, in MB, of which the snapshot itself is `saved_mb`
    torch    the same figures for torch's async_save (distributed.checkpoint) of the same tensors: training waits for it
    paused   MB/s of a save while training waits, hashes and fsync included, next to safetensors' save_file with fsync

A step counts for a save if it starts and ends while the save is written. Nothing else may run. All files go to
--directory: choose the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.index import RunFacts
from parallel3d.checkpoint.snapshot import Snapshot, take_snapshot
from parallel3d.checkpoint.write import publish, write_rank_files
from parallel3d.checkpoint.write_throttle import WriteThrottle
from parallel3d.config.derived import num_parameters
from parallel3d.config.load import resolve
from parallel3d.config.schema import Config
from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.inprocess.world import ThreadWorld
from parallel3d.models.make import make_stage
from parallel3d.parallel.background import BackgroundExecutor
from parallel3d.parallel.sharding import UNSHARDED
from parallel3d.trainer.build import RunLanes, prepare_rank
from parallel3d.trainer.context import RankContext, Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.resume import state_to_json
from parallel3d.trainer.step import train_step


class RandomTokens(Reader):
    """Lanes of random tokens, which cost no time to read."""

    def __init__(self, vocab_size: int):
        self._numbers, self._vocab_size = np.random.default_rng(0), vocab_size

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        tokens = self._numbers.integers(0, self._vocab_size, num_tokens + 1, dtype=np.int32)
        return tokens, cursor


def build(options: argparse.Namespace) -> RankContext:
    config = Config.model_validate(
        {
            "model": {
                "vocab_size": options.vocab_size,
                "hidden_size": options.hidden_size,
                "intermediate_size": options.hidden_size * 8 // 3 // 16 * 16,
                "num_hidden_layers": options.num_hidden_layers,
                "num_attention_heads": options.hidden_size // 64,
            },
            "batch": {"global_batch_size": 1, "micro_batch_size": 1, "sequence_length": options.sequence_length},
            "optimizer": {"learning_rate": 1e-4},
            "run": {"num_steps": 10**6},
        }
    )
    config = resolve(config, config_path="benchmark.json")
    grid, world = build_grid(config), ThreadWorld(1)
    rank = prepare_rank(
        config,
        0,
        grid,
        make_stage=make_stage,
        lanes=RunLanes(train=RandomTokens(options.vocab_size)),
        device=torch.device("cpu"),
    )
    start_rank(rank, grid, Transports(make_group=world.make_group(0), links=world.links(0), token=world.tokens[0]))
    return rank


def snapshot_of(rank: RankContext) -> Snapshot:
    return take_snapshot(rank.optimizer, tp=UNSHARDED)


def save(rank: RankContext, directory: Path, snapshot: Snapshot, write_throttle: WriteThrottle) -> None:
    """Writes a save; the copy is already made."""
    checkpoint_dir, step = CheckpointDirectory(directory), rank.state.iteration
    partial = checkpoint_dir.partial_path(step, 0)
    write_rank_files(checkpoint_dir.disk, partial, 0, snapshot, check=write_throttle.throttle)
    facts = RunFacts(state=state_to_json(rank.state), config=rank.config.model_dump())
    publish(checkpoint_dir, partial, step, [0], facts)
    checkpoint_dir.prune(keep_last=1, keep_every=None)


def tensors_of(snapshot: Snapshot) -> dict[str, Tensor]:
    return {
        f"{kind}/{piece.tensor}/{piece.start}": values
        for part in snapshot.ranges
        for kind, piece, values in part.tensors()
    }


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def steps_during(rank: RankContext, is_done: Callable[[], bool]) -> list[float]:
    """The steps that start and end before the save ends."""
    steps = []
    while not is_done():
        steps.append(timed(lambda: train_step(rank)))
    return steps[:-1] or steps


@contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """Measures the peak of resident memory above that at the start, in MB."""
    before, found, over = _resident_mb(), {"mb": 0.0}, threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            found["mb"] = max(found["mb"], _resident_mb() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(1.0)


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    rank = build(options)
    for _ in range(options.warmup):
        train_step(rank)
    executor = BackgroundExecutor("save")
    plain, paused, library = [], [], []
    our_cost, torch_cost = SaveCost(), SaveCost()

    def start_our_save() -> Future[None]:
        snapshot, write_throttle = snapshot_of(rank), WriteThrottle(rank.config.checkpoint.write_share)
        return executor.submit(lambda: save(rank, directory / "ours", snapshot, write_throttle))

    for _ in range(options.saves):
        plain += [timed(lambda: train_step(rank)) for _ in range(options.steps)]
        our_cost.measure(rank, start_our_save)
        snapshot = snapshot_of(rank)
        num_mb, tensors = snapshot.num_bytes / 1e6, tensors_of(snapshot)
        torch_cost.measure(rank, partial(dcp.async_save, tensors, checkpoint_id=directory / "torch", no_dist=True))
        shutil.rmtree(directory / "torch")
        paused.append(num_mb / timed(partial(save, rank, directory / "paused", snapshot, WriteThrottle(1.0))))
        library.append(num_mb / timed(partial(plain_save, tensors, directory / "plain.safetensors")))
        del snapshot, tensors
    plain_s = statistics.median(plain)
    return {
        "parameters": num_parameters(rank.config.model),
        "saved_mb": num_mb,
        "plain_step_s": plain_s,
        **{f"ours_{name}": value for name, value in our_cost.figures(plain_s, num_mb).items()},
        **{f"torch_{name}": value for name, value in torch_cost.figures(plain_s, num_mb).items()},
        "paused_mb_per_s": statistics.median(paused),
        "safetensors_mb_per_s": statistics.median(library),
        "speed_ratio": statistics.median(paused) / statistics.median(library),
    }


class SaveCost:
    """Measures saves of one kind during training."""

    def __init__(self) -> None:
        self._waits: list[float] = []
        self._steps: list[float] = []
        self._writes: list[float] = []
        self._peaks: list[float] = []

    def measure(self, rank: RankContext, begin: Callable[[], Future[Any]]) -> None:
        """One save; training waits until `begin` returns."""
        with peak_memory() as peak:
            started = time.perf_counter()
            future = begin()
            begun = time.perf_counter()
            future.add_done_callback(lambda _: self._writes.append(time.perf_counter() - begun))
            self._steps += steps_during(rank, future.done)
            future.result()
        self._waits.append(begun - started)
        self._peaks.append(peak["mb"])

    def figures(self, plain_s: float, num_mb: float) -> dict[str, Any]:
        step_s = statistics.median(self._steps)
        return {
            "wait_s": statistics.median(self._waits),
            "step_s": step_s,
            "step_ratio": step_s / plain_s,
            "num_steps": len(self._steps),
            "mb_per_s": num_mb / statistics.median(self._writes),
            "peak_mb": max(self._peaks),
        }


def plain_save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in [
        ("vocab-size", 16384),
        ("hidden-size", 1024),
        ("num-hidden-layers", 13),
        ("sequence-length", 512),
        ("saves", 5),
        ("steps", 5),
        ("warmup", 3),
    ]:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary folder if not given")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        figures = measure(options, Path(directory))
    for name, value in figures.items():
        print(f"{name:22} {value:,.3f}" if isinstance(value, float) else f"{name:22} {value:,}")
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
