"""What makes a layout slow or tight, in words, and what makes the best one win. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from parallel3d.costs.layout_estimate import LayoutEstimate
from parallel3d.costs.layout_search import LayoutChoice, RankedLayouts
from parallel3d.costs.stage_work import ALIGNMENT
from parallel3d.rehearsal.device_rows import GIB

EXPOSED, LARGE_BUBBLE, TIGHT = 0.05, 0.20, 0.95
"""Shares of a step, and of the memory, from which a warning is given."""


LARGEST_HOST = 32
"""Devices of the largest host that a row stands for (Trn1's NeuronCores)."""


def find_cliffs(estimate: LayoutEstimate) -> Iterator[str]:
    """Yields a line for each."""
    config, machines = estimate.config, estimate.machines
    parallel, model, step_s = config.parallel, config.model, estimate.step_s
    tp, dp = estimate.traffic["tp"], estimate.traffic["dp"]
    memory = estimate.worst.total / (machines.device.memory_gib * GIB)
    if machines.devices_per_host > LARGEST_HOST:
        several = f"8x{machines.device.name}:{-(-machines.num_devices // 8)}"
        yield f"{machines.devices_per_host} devices on one host, with its links between all: hosts of 8 are {several}"
    if not machines.is_within_host(size=parallel.tp_size):
        yield (
            f"tensor parallelism crosses hosts: groups of {parallel.tp_size} on hosts of {machines.devices_per_host}; "
            f"{tp.exposed_s / step_s:.0%} of the step waits for it at {tp.bandwidth / 1e9:.0f} GB/s"
        )
    if dp.exposed_s > EXPOSED * step_s:
        yield (
            f"{dp.exposed_s / step_s:.0%} of the step waits for gradients and weights: one micro-batch does not hide "
            f"{dp.total_s:.2f} s at {dp.bandwidth / 1e9:.0f} GB/s"
        )
    if estimate.bubble > LARGE_BUBBLE:
        yield f"the pipeline idles {estimate.bubble:.0%}: {estimate.num_micro_batches} micro-batches a replica are few"
    if model.vocab_size % (ALIGNMENT * parallel.tp_size):
        yield (
            f"the vocabulary of {model.vocab_size:,} is not a multiple of {ALIGNMENT} x tp_size "
            f"({ALIGNMENT * parallel.tp_size}): misaligned products of the head, or rows of padding"
        )
    narrowest = min(model.hidden_size, model.intermediate_size // parallel.tp_size)
    wide = machines.device.rates.wide_from
    if narrowest < wide <= min(model.hidden_size, model.intermediate_size):
        yield f"tp_size {parallel.tp_size} makes products {narrowest:,} wide, below {wide:,}: slower"
    if memory > 1:
        yield f"a rank needs {memory:.0%} of the device's memory: it does not fit"
    elif memory > TIGHT:
        yield f"memory is {memory:.0%} full: what was not foreseen has no room"
    assert config.batch.num_micro_batches is not None
    if (rest := config.batch.num_micro_batches % (parallel.dp_size or 1)) != 0:
        yield f"micro-batches do not divide by replicas: in the last round {rest} of {parallel.dp_size} have work"


def explain_best(ranked: RankedLayouts) -> Iterator[str]:
    """Yields, for each choice of the best layout, what the best one with another choice there loses."""
    if not ranked.estimates:
        return
    best, first = ranked.layouts[0], ranked.estimates[0]
    for field in fields(LayoutChoice):
        if field.name == "dp" or (field.name == "schedule" and best.pp == 1):
            continue
        other = next(
            (
                (layout, estimate)
                for layout, estimate in zip(ranked.layouts, ranked.estimates)
                if getattr(layout, field.name) != getattr(best, field.name)
            ),
            None,
        )
        if other is None:
            continue
        layout, estimate = other
        loss = estimate.step_s / first.step_s - 1
        yield (
            f"{field.name} {getattr(best, field.name)}: with {getattr(layout, field.name)} at best {loss:+.1%} "
            f"({layout}; {_difference(first, estimate)})"
        )


def _difference(best: LayoutEstimate, other: LayoutEstimate) -> str:
    """The part of the step that grows most."""
    more = {name: seconds - parts_of_step(best)[name] for name, seconds in parts_of_step(other).items()}
    name = max(more, key=lambda part: more[part])
    return f"mostly {name}, {more[name]:+.2f} s" if more[name] > 0 else "equal"


def parts_of_step(estimate: LayoutEstimate) -> dict[str, float]:
    """Seconds of a step by cause."""
    tp_s = estimate.traffic["tp"].exposed_s
    return {
        "computing": estimate.num_micro_batches * max(estimate.stage_s) - tp_s,
        "tensor-parallel collectives": tp_s,
        "idle in the pipeline": estimate.idle_s,
        "gradients and weights": estimate.traffic["dp"].exposed_s,
        "update": estimate.update_s,
        "the entry": estimate.entry_s,
    }
