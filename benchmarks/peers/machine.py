"""Measures the machine's limit: the model's matrix products and attention alone, back to back.

A step here is the compute of one training step of this process: each product of the model forward, for its input's and
its weight's gradient, as often as a step needs it, at the shapes of one micro-batch, plus attention forward and
backward. Each kernel is run in every available way that is not far too slow (torch.mm, parallel3d's matmul, of bf16
factors also after widening them to fp32; the head's product also some tokens at a time; weight gradients in bf16 by
AMX's tiles, straight into fp32; attention as torch's SDPA and as products over blocks of queries), and the fastest
counts: that with the lowest median over the steps so far. So no training code on these kernels can be faster. With
tp_size 2 the shapes are those of a tensor-parallel half. Two processes run the same kernel at the same time, and the
step is that of the slower one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.steps import report_step
from benchmarks.peers.training import parse_arguments
from benchmarks.peers.workload import Workload
from parallel3d.kernels.c_loops import has_c_loops
from parallel3d.kernels.c_weight_grad import add_weight_grad
from parallel3d.kernels.layer_kernels import layer_kernels
from parallel3d.layers.block_attention import attend_in_blocks
from parallel3d.layers.gemm import add_matmul, matmul

TOO_SLOW = 10.0
CUT_TOKENS = 256  # rows of logits that fit a last-level cache
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUTS = {"single": (1, 1), "dp2": (1, 2), "tp2": (2, 1)}
"""Shards of each weight, shares of the batch."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One piece of work, in all ways to do it."""

    name: str
    count: int
    """Of a micro-batch, or of a step."""
    flops: float
    ways: dict[str, Callable[[], object]]
    is_of_step: bool = False


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=tuple(LAYOUTS))
    tp_size, dp_size = LAYOUTS[options.kind]
    join_processes(tp_size * dp_size)
    report_limit(list(kernels(workload, tp_size)), workload.num_micro_batches // dp_size, options.steps)


def join_processes(count: int) -> None:
    if count > 1:
        dist.init_process_group("gloo")


def report_limit(list_of: Sequence[Kernel], num_micro_batches: int, num_steps: int) -> None:
    """Prints the time of each step, in which every kernel takes the fastest of its ways, and the speed of each way."""
    list_of, times = [without_slow_ways(kernel) for kernel in list_of], Times()
    for _ in range(num_steps):
        for kernel in list_of:
            times.add(kernel, {way: time_s(run, kernel.count) for way, run in kernel.ways.items()})
        seconds = slowest(times.step_s(list_of, num_micro_batches))
        print("GFLOPS", json.dumps({kernel.name: times.gflops(kernel) for kernel in list_of}))
        report_step(seconds)
    if dist.is_initialized():
        dist.destroy_process_group()


def without_slow_ways(kernel: Kernel) -> Kernel:
    """Leaves out what takes longer than TOO_SLOW times the fastest way, in its second run, too.

    torch.mm of bf16 makes 1.2 to 17 GFLOP/s on an AMD EPYC without AVX-512: a step of that alone takes minutes.
    """
    seconds = {way: slowest(time_s(run, 1)) for way, run in kernel.ways.items()}
    most = TOO_SLOW * min(seconds.values())
    fits = {way: took <= most or slowest(time_s(kernel.ways[way], 1)) <= most for way, took in seconds.items()}
    return replace(kernel, ways={way: run for way, run in kernel.ways.items() if fits[way]})


class Times:
    """Seconds of kernels by name and way, a list of all steps so far."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, list[float]]] = {}

    def add(self, kernel: Kernel, seconds: Mapping[str, float]) -> None:
        of_kernel = self._seconds.setdefault(kernel.name, {way: [] for way in seconds})
        for way, took in seconds.items():
            of_kernel[way].append(took)

    def step_s(self, list_of: Sequence[Kernel], num_micro_batches: int) -> float:
        """The last step's, in the ways with the lowest medians.

        With the shortest times of the step itself, luck would count: of four equal ways the luckiest.
        """
        return sum(
            self._seconds[kernel.name][self._fastest(kernel)][-1] * (1 if kernel.is_of_step else num_micro_batches)
            for kernel in list_of
        )

    def gflops(self, kernel: Kernel) -> dict[str, float]:
        ways = self._seconds[kernel.name]
        return {way: kernel.flops * kernel.count / median(seconds) / 1e9 for way, seconds in ways.items()}

    def _fastest(self, kernel: Kernel) -> str:
        ways = self._seconds[kernel.name]
        return min(ways, key=lambda way: median(ways[way]))


def slowest(seconds: float) -> float:
    """The longest time of all processes: a step ends with the last of them."""
    if not dist.is_initialized():
        return seconds
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def time_s(run: Callable[[], object], count: int) -> float:
    """Seconds of `count` runs, started together with the other process."""
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - started


def kernels(workload: Workload, tp_size: int) -> Iterator[Kernel]:
    tokens, hidden = workload.micro_batch_size * workload.sequence_length, workload.hidden_size
    inner, layers = workload.intermediate_size // tp_size, workload.num_hidden_layers
    dtype = DTYPES[workload.policy]
    for name, num_in, num_out, count in (
        ("qkv", hidden, 3 * hidden // tp_size, layers),
        ("attention output", hidden // tp_size, hidden, layers),
        ("gate and up", hidden, 2 * inner, layers),
        ("down", inner, hidden, layers),
        ("head", hidden, workload.vocab_size // tp_size, 1),
    ):
        yield from product_kernels(name, tokens, num_in, num_out, count, dtype)
    yield attention_kernel(workload, workload.num_attention_heads // tp_size, layers, dtype)


def product_kernels(
    name: str, tokens: int, num_in: int, num_out: int, count: int, dtype: torch.dtype
) -> Iterator[Kernel]:
    """y = x W^T, dx = dy W, dW = dy^T x."""
    x, weight = torch.randn(tokens, num_in, dtype=dtype), torch.randn(num_out, num_in, dtype=dtype)
    grad = torch.randn(tokens, num_out, dtype=dtype)
    for direction, a, b in (
        ("forward", x, weight.t()),
        ("input gradient", grad, weight),
        ("weight gradient", grad.t(), x),
    ):
        ways: dict[str, Callable[[], object]] = {"torch": partial(torch.mm, a, b), "ours": partial(matmul, a, b)}
        if dtype is torch.bfloat16:
            into_fp32 = partial(add_matmul, torch.zeros(num_out, num_in), a, b, "widened", overwrite=True)
            is_weight_grad = direction == "weight gradient"
            ways["widened"] = into_fp32 if is_weight_grad else partial(matmul, a, b, "widened")
        if count == 1:  # the head
            ways["ours, cut"] = partial(cut_matmul, a, b, tokens)
        by_tiles = partial(add_weight_grad, torch.zeros(num_out, num_in), grad, x, overwrite=True)
        if direction == "weight gradient" and by_tiles():  # if sizes, format and machine fit
            ways["by tiles"] = by_tiles
        yield Kernel(name=f"{name} {direction}", count=count, flops=2.0 * tokens * num_in * num_out, ways=ways)


def cut_matmul(a: Tensor, b: Tensor, tokens: int) -> None:
    """a @ b, some tokens at a time: along the rows, or for a weight's gradient along what is summed."""
    for start in range(0, tokens, CUT_TOKENS):
        part = slice(start, start + CUT_TOKENS)
        matmul(a[:, part], b[part]) if a.shape[1] == tokens else matmul(a[part], b)


def attention_kernel(workload: Workload, num_heads: int, count: int, dtype: torch.dtype) -> Kernel:
    """Causal attention forward and backward; the masked half is not counted, the backward's recomputation is."""
    batch, seq = workload.micro_batch_size, workload.sequence_length
    head_size = workload.hidden_size // workload.num_attention_heads
    q, k, v = (torch.randn(batch, seq, num_heads, head_size, dtype=dtype).requires_grad_() for _ in range(3))
    grad = torch.randn(batch, num_heads, seq, head_size, dtype=dtype)

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(attend(*(part.transpose(1, 2) for part in (q, k, v))), (q, k, v), grad)

    kernels = layer_kernels("c" if has_c_loops() else "torch").attention
    ways = {
        "torch": partial(F.scaled_dot_product_attention, is_causal=True),
        "ours": partial(attend_in_blocks, kernels=kernels),
    }
    flops = 3.5 * 2.0 * batch * num_heads * seq**2 * head_size
    return Kernel(
        name="attention", count=count, flops=flops, ways={way: partial(run, attend) for way, attend in ways.items()}
    )


if __name__ == "__main__":
    main()
