"""Shared parts of the peers' scripts: command line, random batches, formats.

A script runs in one process per rank, started as by torchrun (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from benchmarks.peers.workload import Workload, add_workload, read_workload

NUM_DISTINCT_STEPS = 4  # number of steps after which random tokens repeat
SEED = 1234

MicroBatch = tuple[Tensor, Tensor]
"""Token ids and targets, both (micro_batch_size, sequence_length)."""


def parse_arguments(description: str | None, kinds: Sequence[str] = ()) -> tuple[Workload, argparse.Namespace]:
    """The workload and the other options; `kinds` are the ways that a script can run."""
    parser = argparse.ArgumentParser(description=description)
    if kinds:
        parser.add_argument("kind", choices=kinds)
    add_workload(parser)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(SEED)
    return read_workload(options), options


def global_batch(workload: Workload, step: int) -> tuple[Tensor, Tensor]:
    """The step's ids and targets, (global_batch_size, sequence_length): the same whatever the layout."""
    generator = torch.Generator().manual_seed(SEED + step % NUM_DISTINCT_STEPS)
    shape = (workload.global_batch_size, workload.sequence_length + 1)
    tokens = torch.randint(workload.vocab_size, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def micro_batches(workload: Workload, step: int, rank: int = 0, num_ranks: int = 1) -> list[MicroBatch]:
    """The micro-batches of one of `num_ranks` replicas."""
    size = workload.micro_batch_size
    return list(zip(*(part.chunk(num_ranks)[rank].split(size) for part in global_batch(workload, step))))


def autocast(workload: Workload) -> AbstractContextManager[None]:
    """bf16 products on fp32 weights, or nothing."""
    return torch.autocast("cpu", torch.bfloat16, enabled=workload.policy == "bf16")


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def accumulate(
    workload: Workload,
    batches: Sequence[MicroBatch],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    before: Callable[[bool], None] = lambda is_last: None,
) -> float:
    """Forward and backward over a replica's micro-batches, `before` called ahead of each; returns the mean loss."""
    total = 0.0
    for index, (ids, targets) in enumerate(batches):
        before(index == len(batches) - 1)
        with autocast(workload):
            loss = loss_of(ids, targets) / len(batches)
        loss.backward()
        total += loss.item()
    return total
