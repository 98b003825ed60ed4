"""Measures the machine's limit of two tensor-parallel processes with what they exchange.

Products, attention, streams of bytes (`machine_with_memory.py`), and what both processes exchange through parallel3d's
shared memory: sums over both, four a layer and micro-batch, or under sequence parallelism as many all-gathers and
reduce-scatters. They come one after the other here, so that a process waits for the other once; in training it waits
in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import cycle
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.machine import DTYPES, Kernel, join_processes, kernels, report_limit
from benchmarks.peers.machine_with_memory import elementwise_traffic, stream
from benchmarks.peers.training import parse_arguments
from benchmarks.peers.workload import Workload
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.shared_memory import share_memory
from parallel3d.parallel.shared_memory_group import SharedMemoryGroup

TIMEOUT_S = 60.0
PER_LAYER = 4
"""Forward of the results of attention and MLP, backward of the gradients of their inputs; and gathers as many."""


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=("tp2", "tp2+sp"))
    shards_tokens = options.kind == "tp2+sp"
    join_processes(2)
    streams = [stream(traffic) for traffic in elementwise_traffic(workload, 2, 1, shards_tokens=shards_tokens)]
    exchanged = exchanges(workload, shared_memory_group(), shards_tokens=shards_tokens)
    report_limit([*kernels(workload, 2), *streams, *exchanged], workload.num_micro_batches, options.steps)


def shared_memory_group() -> SharedMemoryGroup:
    """Of both processes, which find each other in a folder of the first."""
    rank = dist.get_rank()
    with TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        store = dist.FileStore(f"{folders[0]}/store", 2)
        memory = share_memory(store, "benchmark", rank=rank, size=2, timeout=timedelta(seconds=TIMEOUT_S))
        dist.barrier()
    assert memory is not None, "two processes of one host, and a C compiler"
    return SharedMemoryGroup(
        name="benchmark", rank=rank, ranks=(0, 1), memory=memory, token=AbortToken(), timeout_s=TIMEOUT_S
    )


def exchanges(workload: Workload, group: SharedMemoryGroup, *, shards_tokens: bool) -> Iterator[Kernel]:
    count = PER_LAYER * workload.num_hidden_layers
    tokens, dtype = workload.micro_batch_size * workload.sequence_length, DTYPES[workload.policy]
    wholes = torch.zeros(count, tokens, workload.hidden_size, dtype=dtype)
    parts = torch.zeros(count, tokens // 2, workload.hidden_size, dtype=dtype)

    ways: dict[str, Callable[[Tensor, Tensor], object]] = {"sum": lambda whole, part: group.all_reduce(whole)}
    if shards_tokens:
        ways = {"all-gather": group.all_gather, "reduce-scatter": lambda whole, part: group.reduce_scatter(part, whole)}
    for name, way in ways.items():
        pairs = cycle(zip(wholes, parts))
        run = partial(exchange_next, way, pairs)
        yield Kernel(name=f"{name} (bytes)", count=count, flops=float(wholes[0].nbytes), ways={"ours": run})


def exchange_next(way: Callable[[Tensor, Tensor], object], pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    way(*next(pairs))


if __name__ == "__main__":
    main()
