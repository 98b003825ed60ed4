"""Measures the cost of an update by number format, in nanoseconds per element and thread.

    MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 \\
        python benchmarks/updates.py [--elements 8000000] [--rounds 7] [--threads 1] [--side 1024]

Updates one flat range, as a bucket's owner does: torch's fused AdamW on fp32 weights (12 bytes of weights and moments
per element, 4 of gradient), the same with a copy of the master weights into bf16, AdamW on bf16 weights and moments (6
and 2 bytes) rounded to the nearest or stochastically, by torch's operators and by one loop in C, and Lion in fp32 (8
and 4 bytes). Muon updates matrices of SIDE x
SIDE in fp32 on one of 1, 2 or 4 tensor-parallel ranks: each rank computes the whole direction, so its own elements cost
more. Contestants take turns; medians and the fastest are printed. The variables keep freed memory in the process, as
workers do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.kernels.c_update import update_range
from parallel3d.kernels.update_table import Piece, UpdateTable
from parallel3d.optim.bucket_plan import ParamSlot
from parallel3d.optim.matrices import make_directions
from parallel3d.optim.update_rules import default_settings
from parallel3d.optim.update_rules.adamw import AdamW
from parallel3d.optim.update_rules.lion import Lion
from parallel3d.optim.update_rules.muon import Muon
from parallel3d.optim.update_rules.update_rule import MatrixRule, UpdateStep
from parallel3d.optim.updater import Updater, Updaters, build_updater
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.random_keys import Key, bits, key_of

STEP = UpdateStep(number=10, learning_rate=1e-4, peak_learning_rate=1e-4, grad_scale=0.5)
ADAMW = Updaters.build(OptimizerConfig(learning_rate=1.0)).element
LION, MUON = Updater(rule=Lion()), Updater(rule=Muon())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", type=int, default=1024, help="rows and columns of Muon's matrix")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    variants = {name: (options.elements, update) for name, update in make_variants(options.elements).items()}
    variants |= dict(make_muon_variants(options.side))
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds + 1):
        for name, (num_elements, update) in variants.items():
            started = time.perf_counter()
            update()
            times[name].append(1e9 * (time.perf_counter() - started) / num_elements)
    print("| update | ns per element, median | fastest |\n|---|--:|--:|")
    for name, each in times.items():
        print(f"| {name} | {statistics.median(each[1:]):.2f} | {min(each[1:]):.2f} |")


def make_variants(num_elements: int) -> dict[str, Callable[[], object]]:
    """Contestants by name, each with tensors of its own."""
    key = key_of("update", 1, 2, "w")

    def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        numbers = torch.Generator().manual_seed(1)
        weights, grads = (torch.randn(num_elements, generator=numbers).to(dtype) for _ in range(2))
        return weights, torch.zeros(2, num_elements, dtype=dtype), grads

    def noise(span: range) -> Tensor:
        return bits(key, torch.arange(span.start, span.stop))

    wide, mixed, near, stochastic = (tensors(d) for d in (torch.float32, torch.float32, *[torch.bfloat16] * 2))
    lion_weights, lion_states, lion_grads = tensors(torch.float32)
    copy = mixed[0].bfloat16()

    def update_mixed() -> None:
        ADAMW.update(*mixed, STEP, weight_decay=0.1)
        copy.copy_(mixed[0])

    return {
        "fp32, fused": lambda: ADAMW.update(*wide, STEP, weight_decay=0.1),
        "bf16 with fp32 master weights, fused": update_mixed,
        "bf16_pure": lambda: ADAMW.update(*near, STEP, weight_decay=0.1, noise=None),
        "bf16_sr": lambda: ADAMW.update(*stochastic, STEP, weight_decay=0.1, noise=noise),
        "bf16_pure in C": make_update_in_c(tensors(torch.bfloat16), "nearest", key),
        "bf16_sr in C": make_update_in_c(tensors(torch.bfloat16), "stochastic", key),
        "fp32, lion": lambda: LION.update(lion_weights, lion_states[:1], lion_grads, STEP, weight_decay=0.1),
    }


def make_update_in_c(tensors: tuple[Tensor, Tensor, Tensor], rounding: str, key: Key) -> Callable[[], object]:
    """AdamW's, which also measures what it stores."""
    updater = build_updater(AdamW, default_settings(AdamW.name), form="c")
    formula, size = updater.range_formula, len(tensors[0])
    assert formula is not None
    piece = Piece(start=0, stop=size, origin=0, width=size, stride=size, shift=0, name="w")
    table, numbers = UpdateTable.build([piece], [key]), updater.rule.scalars(STEP, weight_decay=0.1)
    return lambda: update_range(
        formula, numbers, tensors, table, grad_scale=STEP.grad_scale, rounding=rounding, variance=1, measures=True
    )


def make_muon_variants(side: int) -> Iterator[tuple[str, tuple[int, Callable[[], object]]]]:
    """Muon's update of one rank's rows of a matrix, with the directions; by name, with the number of its elements."""
    sharding = ParamSharding(name="w", shape=(side, side), dim=0)
    for tp_size in (1, 2, 4):
        num_elements = side * side // tp_size
        slot = ParamSlot(name="w", offset=0, shape=sharding.local_shape(tp_size))
        gathered = torch.randn(tp_size, 2, num_elements, generator=torch.Generator().manual_seed(2))
        weights, states, grads = torch.zeros(num_elements), torch.zeros(1, num_elements), gathered[0, 0].clone()

        def update(
            gathered: Tensor = gathered,
            slot: ParamSlot = slot,
            tensors: tuple[Tensor, Tensor, Tensor] = (weights, states, grads),
        ) -> None:
            span = range(slot.length)
            rule = cast(MatrixRule, MUON.rule)
            directions = make_directions(rule, gathered, [(sharding, slot)], span, grad_scale=0.5, tp_rank=0)
            MUON.update(*tensors, STEP, weight_decay=0.1, directions=directions)

        yield f"fp32, muon, {side} x {side}, tp {tp_size}", (num_elements, update)


if __name__ == "__main__":
    main()
