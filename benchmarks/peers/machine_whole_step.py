"""Measures a tensor-parallel step of little but what it can't do without, in its order.

The products and the attention of `machine_in_order.py`, between them streams of the bytes that elementwise work moves
(`machine_with_memory.py`), and a sum over both processes, through parallel3d's shared memory, wherever one is needed:
backward it is under way beside the weight's gradient. So processes wait for each other as often as in training.
Queries, keys and values are copied to the order of attention, which training does with their positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.machine import join_processes, time_s
from benchmarks.peers.machine_in_order import TRIES, Layer, Model, fastest_ways, product
from benchmarks.peers.machine_with_exchanges import shared_memory_group
from benchmarks.peers.machine_with_memory import elementwise_traffic, stream
from benchmarks.peers.steps import report_step
from benchmarks.peers.training import parse_arguments
from benchmarks.peers.workload import Workload

STREAMS_BEFORE = {"qkv": ["norm of a sum"], "gate and up": ["norm of a sum"], "down": ["SwiGLU"]}
"""Forward: what is moved before a product."""
STREAMS_AFTER = {"qkv": ["norm's gradient"], "gate and up": ["norm's gradient"], "down": ["SwiGLU's gradient"]}
"""Backward: what is moved after it."""
SUMMED_FORWARD, SUMMED_BACKWARD = ("attention output", "down"), ("gate and up", "qkv")


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=("tp2",))
    join_processes(2)
    model = Step(workload, fastest_ways(workload, 2))
    for _ in range(options.steps):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(workload.num_micro_batches):
            model.run()
        model.move("update")
        report_step(time.perf_counter() - started)
    dist.destroy_process_group()


class Step(Model):
    """A micro-batch of one of two tensor-parallel ranks."""

    def __init__(self, workload: Workload, ways: dict[str, str]):
        super().__init__(workload, 2, ways)
        self.group = shared_memory_group()
        moved = elementwise_traffic(workload, 2, 1)
        self.streams = {traffic.name: fastest_stream(stream(traffic).ways) for traffic in moved}

    def move(self, *names: str) -> None:
        for name in names:
            self.streams[name]()

    def _attend(self, layer: Layer, qkv: Tensor) -> Tensor:
        self.move("positions")
        return super()._attend(layer, qkv)

    def _forward(self, layer: Layer, name: str, x: Tensor) -> Tensor:
        self.move(*STREAMS_BEFORE.get(name, []))
        found = super()._forward(layer, name, x)
        return self.group.all_reduce(found) if name in SUMMED_FORWARD else found

    def _backward(self, layer: Layer, name: str, grad: Tensor) -> Tensor:
        if name == "qkv":
            self.move("positions")
        found = product(self.ways[f"{name} input gradient"], grad, layer.weights[name])
        assert found is not None
        work = self.group.all_reduce_async(found) if name in SUMMED_BACKWARD else None
        product(self.ways[f"{name} weight gradient"], grad.t(), layer.factors.pop(name), layer.sums[name])
        if work is not None:
            work.wait()
        self.move(*STREAMS_AFTER.get(name, []))
        return found


def fastest_stream(ways: dict[str, Callable[[], object]]) -> Callable[[], object]:
    times = {way: min(time_s(run, 8) for _ in range(TRIES)) for way, run in ways.items()}
    return ways[min(times, key=times.__getitem__)]


if __name__ == "__main__":
    main()
