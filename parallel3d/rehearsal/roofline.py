"""From counts to seconds: what limits each kernel. Pure.

    product       FLOPs / (share x peak), the share by its smallest size; 3.3 times as long if its rows are misaligned
    attention     FLOPs / (0.50 x peak) forward, / (0.43 x peak) backward
    elementwise   bytes / (0.79 x bandwidth), the update / (0.58 x bandwidth)
    collective    bytes / (0.75 x bandwidth of the links)

and none takes less than the 4 us that a GPU needs between two small kernels. The shares were measured on one H200 with
a sketch of this program (products 693 of 989 TFLOP/s, elementwise kernels 3.8 of 4.8 TB/s, cuDNN's attention); those of
narrow products, of misaligned ones and of collectives are guesses. No line of it was measured with this code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallel3d.rehearsal.device_rows import DeviceRow, peak_flops
from parallel3d.rehearsal.kernel_counts import KernelCounts, KernelWork, WorkKind

SMALLEST_KERNEL_S = 4e-6
LAUNCH_S = 8e-6
"""Host time of a kernel's start, eager: a step that starts more than it can hide takes as long as its starts."""
WAIT_S = 50e-6
"""Idle time of the device after the host has waited for it."""
STEP_IDLE_S = 4e-3
"""Idle time of a step: its beginning and its end, with the host's part of the entry."""
PRODUCT_SHARES = ((2048, 0.70), (0, 0.565))
"""Share of the peak by a product's smallest size: the first row counts that it reaches."""
MISALIGNED_FACTOR = 3.3
SHARES: Mapping[WorkKind, float] = {
    "attention": 0.50,
    "attention_backward": 0.43,
    "elementwise": 0.79,
    "collective": 0.75,
}
SLOW_KERNELS: Mapping[str, float] = {"_update_range": 0.58}
"""Share of the bandwidth for kernels that compute much: the update's random bits and roundings are some 120
instructions an element, 27 ms at 7B where its bytes take 24, and the two overlap in part."""
RESERVED_GIB = 2.5
"""Memory beyond the tensors: the CUDA context, workspaces of cuBLAS and cuDNN, what the allocator can't use."""


def kernel_s(work: KernelWork, device: DeviceRow) -> float:
    """Seconds of one kernel on the device."""
    peak = peak_flops(device, work.itemsize)
    memory_s = work.num_bytes / (SHARES["elementwise"] * device.bandwidth)
    if work.kind == "product":
        share = next(share for size, share in PRODUCT_SHARES if work.narrowest >= size)
        factor = 1.0 if work.is_aligned else MISALIGNED_FACTOR
        limit_s = max(factor * work.flops / (share * peak), memory_s)
    elif work.kind == "collective":
        limit_s = work.num_bytes / (SHARES["collective"] * device.link_bandwidth)
    elif work.kind == "elementwise":
        share = SLOW_KERNELS.get(work.name, SHARES["elementwise"])
        limit_s = work.num_bytes / (share * device.bandwidth)
    else:
        limit_s = work.flops / (SHARES[work.kind] * peak)
    return max(SMALLEST_KERNEL_S, limit_s)


@dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """One part of a step on a device."""

    device_s: float
    """Time that the device computes."""
    idle_s: float
    """Time that it waits: for the host's starts where these take longer, and after waits of the host."""
    num_kernels: int
    elementwise_bytes: int
    num_waits: int

    @property
    def total_s(self) -> float:
        return self.device_s + self.idle_s


def estimate_phase(counts: KernelCounts, device: DeviceRow) -> PhaseEstimate:
    """The time of one part of a step, whose kernels the host starts one after another."""
    device_s = sum(count * kernel_s(work, device) for work, count in counts.works.items())
    return PhaseEstimate(
        device_s=device_s,
        idle_s=max(0.0, counts.num_kernels * LAUNCH_S - device_s) + counts.num_waits * WAIT_S,
        num_kernels=counts.num_kernels,
        elementwise_bytes=counts.elementwise_bytes,
        num_waits=counts.num_waits,
    )


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """A whole step on a device."""

    device: DeviceRow
    phases: Mapping[str, PhaseEstimate]
    num_tokens: int
    model_flops: float
    """FLOPs of the model for these tokens, recomputation not counted."""
    peak_gib: float

    @property
    def step_s(self) -> float:
        return STEP_IDLE_S + sum(phase.total_s for phase in self.phases.values())

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def mfu(self) -> float:
        return self.model_flops / self.step_s / peak_flops(self.device, 2)

    @property
    def fits(self) -> bool:
        return self.peak_gib <= self.device.memory_gib


def estimate_step(
    phases: Mapping[str, KernelCounts], device: DeviceRow, *, num_tokens: int, model_flops: float, peak_bytes: int
) -> StepEstimate:
    """The estimate for one rank's step."""
    return StepEstimate(
        device=device,
        phases={name: estimate_phase(counts, device) for name, counts in phases.items()},
        num_tokens=num_tokens,
        model_flops=model_flops,
        peak_gib=peak_bytes / 2**30 + RESERVED_GIB,
    )
