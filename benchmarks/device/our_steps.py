"""Training steps of this project in one process, on random tokens: built by the trainer's lines, timed on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from parallel3d.accelerator import accelerator_of
from parallel3d.config.schema import Config
from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.inprocess.world import ThreadWorld
from parallel3d.models.make import make_stage
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.group import Group, SoloGroup
from parallel3d.trainer.build import RunLanes, prepare_rank
from parallel3d.trainer.context import RankContext, Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid

GIB = 2**30


class RandomReader(Reader):
    """Lanes of random tokens, the same for each cursor."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        numbers = np.random.default_rng((lane, cursor[0]))
        tokens = numbers.integers(self._vocab_size, size=num_tokens + 1, dtype=np.int32)
        return tokens, (cursor[0] + num_tokens, *cursor[1:])


def build_rank(config: Config, device: torch.device) -> RankContext:
    """The only rank of a run on one device, ready to step."""
    grid = build_grid(config)
    lanes = RunLanes(train=RandomReader(config.model.vocab_size))
    rank = prepare_rank(config, 0, grid, make_stage=make_stage, lanes=lanes, device=device)
    links = ThreadWorld(1).links(0)
    start_rank(rank, grid, Transports(make_group=_solo, links=links, token=AbortToken()))
    return rank


def _solo(name: str, ranks: tuple[int, ...]) -> Group:
    return SoloGroup(name=name)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the timed steps."""

    seconds: list[float]
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """By the median step."""
        return self.num_tokens / statistics.median(self.seconds)

    def to_json(self) -> dict[str, object]:
        milliseconds = [round(1e3 * seconds, 2) for seconds in self.seconds]
        return {"tokens_per_s": round(self.tokens_per_s, 1), "step_ms": milliseconds}


def time_steps(
    step: Callable[[], object], device: torch.device, *, num_tokens: int, num_steps: int, num_warmup: int
) -> StepTimes:
    """Times `step`, which processes `num_tokens`; the device has finished before and after each."""
    seconds = []
    for number in range(num_warmup + num_steps):
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        if number >= num_warmup:
            seconds.append(time.perf_counter() - started)
    return StepTimes(seconds=seconds, num_tokens=num_tokens)


def synchronize(device: torch.device) -> None:
    if (accelerator := accelerator_of(device)) is not None:
        accelerator.synchronize()


def peak_gib(device: torch.device) -> float | None:
    """The most memory that torch's tensors took on a GPU since `reset_peak`."""
    return round(torch.cuda.max_memory_allocated(device) / GIB, 2) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
