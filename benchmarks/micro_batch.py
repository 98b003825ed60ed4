"""Says where the time of a micro-batch goes, next to that of the same kernels alone.

    MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 \\
        python benchmarks/micro_batch.py --policy bf16 --threads 2 --rounds 9

Each round runs one forward and backward pass of the whole model on one rank, its kernels timed, and right after it the
products and the attention alone and the streams of peers/machine_with_memory.py, so that changes in the machine's speed
from minute to minute affect both. Printed are medians and the shortest times, and of each round's two shares of the
micro-batch the median: products and attention alone, and those with the streams. The update and the exchanges between
ranks are not part of it. The variables keep freed memory in the process, as workers do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.peers.machine import DTYPES, Kernel, kernels, time_s
from benchmarks.peers.machine_with_memory import elementwise_traffic, stream
from benchmarks.peers.workload import Workload, add_workload, read_workload
from benchmarks.recompute import build, step
from parallel3d.kernels.c_loops import has_c_loops
from parallel3d.kernels.layer_kernels import layer_kernels
from parallel3d.layers.gemm import Gemm
from parallel3d.worker.gemm_timing import known_or_measured, linear_shapes

REST = "autograd, Python, sums, copies"
PARTS = {
    "rms_norm": "norms",
    "rotary": "positions and the split",
    "attention": "attention",
    "silu_times": "SwiGLU",
    "cross_entropy": "cross-entropy",
    "add_rows": "the embedding's gradient",
}
ROLES = {"forward": "products forward", "input gradient": "products backward", "weight gradient": "weight gradients"}
ATTENTION = "attention"
STREAMS = "streams"


class PartTimer:
    """Adds up seconds by part; a part within another counts for itself alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds: Counter[str] = Counter()
        self._clock, self._inner_s = clock, [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = self._clock()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            took = self._clock() - started
            self.seconds[name] += took - self._inner_s.pop()
            self._inner_s[-1] += took

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*arguments, **options)

        return timed

    def wrap_table(self, table: Any, part: str | None = None) -> Any:
        """The kernels of a table, each timed as the part that its field stands for."""
        found = {}
        for each in fields(table):
            kernel, name = getattr(table, each.name), part or PARTS.get(each.name, each.name)
            if is_dataclass(kernel):
                found[each.name] = self.wrap_table(kernel, name)
            elif callable(kernel):
                found[each.name] = self.wrap(name, kernel)
        return replace(table, **found)


@dataclass(frozen=True)
class TimedGemm(Gemm):
    """The same products, timed."""

    timer: PartTimer = field(default_factory=PartTimer)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        with self.timer.part(ROLES["forward"]):
            return super().forward(x, weight, bias, out=out)

    def input_grad(self, grad: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        with self.timer.part(ROLES["input gradient"]):
            return super().input_grad(grad, weight, out=out)

    def add_weight_grad(
        self, total: Tensor, grad: Tensor, x: Tensor, *, wide: bool = False, overwrite: bool = False
    ) -> None:
        with self.timer.part(ROLES["weight gradient"]):
            super().add_weight_grad(total, grad, x, wide=wide, overwrite=overwrite)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    workload, timer = read_workload(options), PartTimer()
    run = micro_batch(workload, timer)
    alone = [(part_of(kernel), kernel) for kernel in kernels(workload, 1)]
    alone += [(STREAMS, stream(each)) for each in elementwise_traffic(workload, 1, 1) if not each.is_of_step]
    for _ in range(2):
        run()
    print_table([one_round(run, alone, timer) for _ in range(options.rounds)])


def micro_batch(workload: Workload, timer: PartTimer) -> Callable[[], None]:
    """Runs one, with the libraries and kernels that a run would choose here."""
    options = argparse.Namespace(**vars(workload), device="cpu", hidden_dropout=0.0)
    num_tokens = workload.micro_batch_size * workload.sequence_length
    form = layer_kernels("c" if has_c_loops() else "torch")
    shapes = linear_shapes(build(options, "none", compiles=False), num_tokens)
    with TemporaryDirectory() as no_cache:
        chosen, _ = known_or_measured(shapes, Path(no_cache), dtype=DTYPES[workload.policy])
    gemm = TimedGemm(default=chosen.default, choices=chosen.choices, attention="blocks", timer=timer)
    stage = build(options, "none", compiles=False, kernels=timer.wrap_table(form), gemm=gemm)
    tokens = torch.randint(workload.vocab_size, (num_tokens,))

    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):  # kernels on the thread that the timer is on
            step(stage, tokens, options)

    return run


def part_of(kernel: Kernel) -> str:
    return next((part for role, part in ROLES.items() if kernel.name.endswith(f" {role}")), ATTENTION)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of a micro-batch by part, and of the same kernels alone."""

    parts: dict[str, float]
    alone: dict[str, float]

    def share(self, *, with_streams: bool) -> float:
        """What its kernels alone take, as a share of the micro-batch."""
        alone = sum(seconds for part, seconds in self.alone.items() if with_streams or part != STREAMS)
        return alone / sum(self.parts.values())


def one_round(run: Callable[[], None], alone: list[tuple[str, Kernel]], timer: PartTimer) -> Round:
    timer.seconds.clear()
    with timer.part(REST):
        run()
    parts, times = dict(timer.seconds), defaultdict[str, float](float)
    for part, kernel in alone:
        times[part] += min(time_s(way, kernel.count) for way in kernel.ways.values())
    return Round(parts=parts, alone=dict(times))


def print_table(rounds: list[Round]) -> None:
    print("| part | ms, median | shortest | the same alone, median | shortest |\n|---|--:|--:|--:|--:|")
    largest = sorted(rounds[0].parts, key=lambda part: -rounds[0].parts[part])
    for part in [*largest, STREAMS]:
        times = [[each[part] * 1e3 for each in side if part in each] for side in sides(rounds)]
        columns = [f"{statistics.median(ms):.1f} | {min(ms):.1f}" if ms else " | " for ms in times]
        print(f"| {part} | {' | '.join(columns)} |")
    whole = [sum(each.parts.values()) * 1e3 for each in rounds]
    print(f"| all | {statistics.median(whole):.1f} | {min(whole):.1f} | | |")
    for name, with_streams in (("products and attention", False), ("with streams", True)):
        shares = [each.share(with_streams=with_streams) for each in rounds]
        print(f"share of {name} alone: median {statistics.median(shares):.3f}, {min(shares):.3f} to {max(shares):.3f}")


def sides(rounds: list[Round]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return [each.parts for each in rounds], [each.alone for each in rounds]


if __name__ == "__main__":
    main()
