"""Measures the machine's limit of two tensor-parallel processes with what they exchange.

Products, attention, streams of bytes (`machine_with_memory.py`), and sums over both processes, four a layer and
micro-batch: by parallel3d's shared memory or by gloo, whichever is faster. They come one after the other here, so that
a process waits for the other once; in training it waits before each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.peers.machine import DTYPES, Kernel, join_processes, kernels, report_limit
from benchmarks.peers.machine_with_memory import elementwise_traffic, stream
from benchmarks.peers.training import parse_arguments
from benchmarks.peers.workload import Workload
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.shared_memory import share_memory
from parallel3d.parallel.shared_memory_group import SharedMemoryGroup

TIMEOUT_S = 60.0
SUMS_PER_LAYER = 4
"""Forward of the results of attention and MLP, backward of the gradients of their inputs."""


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=("tp2",))
    join_processes(2)
    streams = [stream(traffic) for traffic in elementwise_traffic(workload, 2, 1)]
    report_limit([*kernels(workload, 2), *streams, *sums(workload, shared_memory_group())], workload, options)


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


def sums(workload: Workload, group: SharedMemoryGroup) -> Iterator[Kernel]:
    count = SUMS_PER_LAYER * workload.num_hidden_layers
    tokens, dtype = workload.micro_batch_size * workload.sequence_length, DTYPES[workload.policy]
    tensors = torch.zeros(count, tokens, workload.hidden_size, dtype=dtype)
    rows = {"shared memory": 0, "gloo": 0}

    def next_tensor(way: str) -> torch.Tensor:
        rows[way] = (rows[way] + 1) % count
        return tensors[rows[way]]

    yield Kernel(
        name="sums over both (bytes)",
        count=count,
        flops=float(tensors[0].nbytes),
        ways={
            "shared memory": lambda: group.all_reduce(next_tensor("shared memory")),
            "gloo": lambda: dist.all_reduce(next_tensor("gloo")),
        },
    )


if __name__ == "__main__":
    main()
