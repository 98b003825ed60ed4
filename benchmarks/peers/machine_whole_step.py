"""Measures a step of little but what it can't do without, in its order.

The products and the attention of `machine_in_order.py`, and between them streams of the bytes that elementwise work
moves (`machine_with_memory.py`). Tensor-parallel processes sum through parallel3d's shared memory wherever one is
needed, under sequence parallelism by all-gathers and reduce-scatters: backward it is under way beside the weight's
gradient. So processes wait for each other as often as in training. Queries, keys and values are copied to the order of
attention, which training does with their positions.
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
from parallel3d.parallel.tensor_parallel import TensorParallel, solo_region

KINDS = ("single", "tp2", "tp2+sp")
COLUMN_PARALLEL, ROW_PARALLEL = ("qkv", "gate and up", "head"), ("attention output", "down")
STREAMS_BEFORE = {"qkv": ["norm of a sum"], "gate and up": ["norm of a sum"], "down": ["SwiGLU"]}
"""Forward: what is moved before a product."""
STREAMS_AFTER = {"qkv": ["norm's gradient"], "gate and up": ["norm's gradient"], "down": ["SwiGLU's gradient"]}
"""Backward: what is moved after it."""


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=KINDS)
    tp_size = 1 if options.kind == "single" else 2
    join_processes(tp_size)
    region = solo_region()
    if tp_size > 1:
        region = TensorParallel(group=shared_memory_group(), sequence_parallel=options.kind == "tp2+sp")
    model = Step(workload, region, fastest_ways(workload, tp_size))
    for _ in range(options.steps):
        if tp_size > 1:
            dist.barrier()
        started = time.perf_counter()
        for _ in range(workload.num_micro_batches):
            model.run()
        model.move("update")
        report_step(time.perf_counter() - started)
    if tp_size > 1:
        dist.destroy_process_group()


class Step(Model):
    """A micro-batch of one process, or of one of two tensor-parallel ranks."""

    def __init__(self, workload: Workload, region: TensorParallel, ways: dict[str, str]):
        tp_size = region.group.size
        super().__init__(workload, tp_size, ways)
        self.region = region
        self.x = self.x[: region.num_local_tokens(len(self.x))]
        moved = elementwise_traffic(workload, tp_size, 1, shards_tokens=region.is_token_sharded)
        self.streams = {traffic.name: fastest_stream(stream(traffic).ways) for traffic in moved}

    def move(self, *names: str) -> None:
        for name in names:
            self.streams[name]()

    def _attend(self, layer: Layer, qkv: Tensor) -> Tensor:
        self.move("positions")
        return super()._attend(layer, qkv)

    def _forward(self, layer: Layer, name: str, x: Tensor) -> Tensor:
        self.move(*STREAMS_BEFORE.get(name, []))
        if name in COLUMN_PARALLEL:
            return super()._forward(layer, name, self.region.gather(x))
        return self.region.sum(super()._forward(layer, name, x))

    def _backward(self, layer: Layer, name: str, grad: Tensor) -> Tensor:
        if name == "qkv":
            self.move("positions")
        if name in ROW_PARALLEL:
            found = super()._backward(layer, name, self.region.gather(grad))
        else:
            found = self._backward_of_columns(layer, name, grad)
        self.move(*STREAMS_AFTER.get(name, []))
        return found

    def _backward_of_columns(self, layer: Layer, name: str, grad: Tensor) -> Tensor:
        """The sum of the input's gradient is under way beside the weight's."""
        input_grad = product(self.ways[f"{name} input gradient"], grad, layer.weights[name])
        assert input_grad is not None
        total, work = self.region.sum_async(input_grad)
        product(self.ways[f"{name} weight gradient"], grad.t(), layer.factors.pop(name), layer.sums[name])
        work.wait()
        return total


def fastest_stream(ways: dict[str, Callable[[], object]]) -> Callable[[], object]:
    times = {way: min(time_s(run, 8) for _ in range(TRIES)) for way, run in ways.items()}
    return ways[min(times, key=times.__getitem__)]


if __name__ == "__main__":
    main()
