"""Prints estimates: a line for each part of a step, beside the least that it has to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from parallel3d.rehearsal.ideal_counts import IdealWork
from parallel3d.rehearsal.roofline import StepEstimate

_NONE = IdealWork(num_kernels=0, num_bytes=0)


def describe_estimates(estimates: Sequence[StepEstimate], ideal: Mapping[str, IdealWork]) -> Iterator[str]:
    """Lines for one configuration on several devices. Bytes are those of kernels that are neither products nor
    attention."""
    first, *_ = estimates
    times = "".join(f"{estimate.device.name + ' ms':>15}" for estimate in estimates)
    yield f"{'part':<12}{'kernels':>9}{'ideal':>8}{'GB':>9}{'ideal':>8}{'waits':>7}{times}"
    for name, phase in first.phases.items():
        least = ideal.get(name, _NONE)
        yield (
            f"{name:<12}{phase.num_kernels:>9,}{least.num_kernels:>8,}{phase.elementwise_bytes / 1e9:>9.1f}"
            f"{least.num_bytes / 1e9:>8.1f}{phase.num_waits:>7}"
            + "".join(f"{1e3 * estimate.phases[name].total_s:>15.1f}" for estimate in estimates)
        )
    yield f"{'idle':<53}" + "".join(f"{1e3 * each.device.rates.step_idle_s:>15.1f}" for each in estimates)
    for estimate in estimates:
        yield describe_step(estimate)


def describe_step(estimate: StepEstimate) -> str:
    """One line for a whole step."""
    room = "" if estimate.fits else f", more than the {estimate.device.memory_gib:g} of the device"
    return (
        f"{estimate.device.name}: {1e3 * estimate.step_s:,.0f} ms, {estimate.tokens_per_s:,.0f} tokens/s, "
        f"MFU {estimate.mfu:.1%}, {estimate.peak_gib:.1f} GiB{room} (predicted)"
    )
