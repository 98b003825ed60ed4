"""Measures the machine's limit with the memory that elementwise work moves: products, attention, and streams of bytes.

`benchmarks/peers/machine.py` counts products and attention as if all between them were free. Here each elementwise
operation takes as long as a stream of the bytes that it can't do without: a tensor that a product has made is read
once, one that a product needs or the backward pass keeps is written once, and the update reads and writes its state
once a step. Streams are torch's copy and its sum of two tensors, whichever is faster, over as many tensors as a
micro-batch has. An implementation that calls a library for products, and computes the rest in kernels of its own, has
to move these bytes, however good the kernels are. Left out: all arithmetic, the loss (a block of logits stays in a
cache), the embedding, and what ranks exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.peers.machine import DTYPES, LAYOUTS, Kernel, join_processes, kernels, report_limit
from benchmarks.peers.training import parse_arguments
from benchmarks.peers.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The bytes that an operation reads and writes, and how often it runs: in a micro-batch, or in a step."""

    name: str
    count: int
    num_bytes: int
    is_of_step: bool = False


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=("single", "dp2", "tp2"))
    tp_size, dp_size = LAYOUTS[options.kind]
    join_processes(tp_size * dp_size)
    streams = [stream(traffic) for traffic in elementwise_traffic(workload, tp_size, dp_size)]
    report_limit([*kernels(workload, tp_size), *streams], workload.num_micro_batches // dp_size, options.steps)


def elementwise_traffic(
    workload: Workload, tp_size: int, dp_size: int, *, shards_tokens: bool = False
) -> Iterator[Traffic]:
    """Of one rank; replicas share the update (ZeRO-1), and under sequence parallelism ranks share the norms' tokens."""
    layers, itemsize = workload.num_hidden_layers, DTYPES[workload.policy].itemsize
    row = workload.micro_batch_size * workload.sequence_length * itemsize
    hidden, inner = row * workload.hidden_size, row * workload.intermediate_size // tp_size
    rotated = 2 * hidden // tp_size
    normed = hidden // tp_size if shards_tokens else hidden
    yield Traffic(name="norm of a sum", count=2 * layers, num_bytes=4 * normed)  # x, delta -> sum, normed
    yield Traffic(name="norm's gradient", count=2 * layers, num_bytes=4 * normed)  # grad, sum, residual's -> grad
    yield Traffic(name="positions", count=2 * layers, num_bytes=2 * rotated)  # queries and keys in place, both ways
    yield Traffic(name="SwiGLU", count=layers, num_bytes=3 * inner)  # gate, up -> product
    yield Traffic(name="SwiGLU's gradient", count=layers, num_bytes=6 * inner)  # and the product again
    numbers = num_parameters(workload) // (tp_size * dp_size)
    state = 7 * 4 + (itemsize if itemsize < 4 else 0)  # weight, gradient, two moments -> all but the gradient
    yield Traffic(name="update", count=1, num_bytes=state * numbers, is_of_step=True)


def num_parameters(workload: Workload) -> int:
    """Of matrices."""
    layer = 4 * workload.hidden_size**2 + 3 * workload.hidden_size * workload.intermediate_size
    return workload.num_hidden_layers * layer + 2 * workload.vocab_size * workload.hidden_size


def stream(traffic: Traffic) -> Kernel:
    """Moves as many bytes, each time from and to other tensors; speeds are bytes instead of operations."""
    size = traffic.num_bytes // 4  # numbers of 4 bytes
    source, other, target = (torch.ones(traffic.count, size // parts) for parts in (2, 3, 2))
    rows = {"copy": 0, "sum": 0}

    def row_of(way: str) -> int:
        rows[way] = (rows[way] + 1) % traffic.count
        return rows[way]

    def copy() -> None:
        row = row_of("copy")
        target[row].copy_(source[row])

    def add() -> None:
        row, third = row_of("sum"), other.shape[1]
        torch.add(source[row, :third], other[row], out=target[row, :third])

    return Kernel(
        name=f"{traffic.name} (bytes)",
        count=traffic.count,
        flops=float(traffic.num_bytes),
        ways={"copy": copy, "sum": add},
        is_of_step=traffic.is_of_step,
    )


if __name__ == "__main__":
    main()
