"""What an update costs by number format: nanoseconds an element, one thread.

    MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 \\
        python benchmarks/updates.py [--elements 8000000] [--rounds 7] [--threads 1]

One flat range, as a bucket's owner updates it: torch's fused AdamW on fp32 weights (12 bytes of weights and moments an
element, 4 of gradient), with a copy of the master weights into bf16, and AdamW on bf16 weights and moments (6 and 2
bytes) rounded to the nearest or stochastically. Contestants in turn, round after round; printed are medians and the
fastest. The variables keep freed memory in the process, as workers do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.optim.update_rules.update_rule import UpdateStep
from parallel3d.optim.updater import Updaters
from parallel3d.random_keys import bits, key_of

STEP = UpdateStep(number=10, learning_rate=1e-4, peak_learning_rate=1e-4, grad_scale=0.5)
ADAMW = Updaters.build(OptimizerConfig(learning_rate=1.0)).element


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    variants = make_variants(options.elements)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds + 1):
        for name, update in variants.items():
            started = time.perf_counter()
            update()
            times[name].append(1e9 * (time.perf_counter() - started) / options.elements)
    print("| update | ns an element, median | fastest |\n|---|--:|--:|")
    for name, each in times.items():
        print(f"| {name} | {statistics.median(each[1:]):.2f} | {min(each[1:]):.2f} |")


def make_variants(num_elements: int) -> dict[str, Callable[[], None]]:
    """Each with tensors of its own."""
    key = key_of("update", 1, 2, "w")

    def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(1)
        weights, grads = (torch.randn(num_elements, generator=numbers).to(dtype) for _ in range(2))
        return weights, torch.zeros(2, num_elements, dtype=dtype), grads

    def noise(span: range) -> torch.Tensor:
        return bits(key, torch.arange(span.start, span.stop))

    wide, mixed, near, stochastic = (tensors(d) for d in (torch.float32, torch.float32, *[torch.bfloat16] * 2))
    copy = mixed[0].bfloat16()

    def update_mixed() -> None:
        ADAMW.update(*mixed, STEP, weight_decay=0.1)
        copy.copy_(mixed[0])

    return {
        "fp32, fused": lambda: ADAMW.update(*wide, STEP, weight_decay=0.1),
        "bf16 with fp32 master weights, fused": update_mixed,
        "bf16_pure": lambda: ADAMW.update_bf16(*near, STEP, weight_decay=0.1, noise=None),
        "bf16_sr": lambda: ADAMW.update_bf16(*stochastic, STEP, weight_decay=0.1, noise=noise),
    }


if __name__ == "__main__":
    main()
