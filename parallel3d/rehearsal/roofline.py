"""From counts to seconds: what limits each kernel. Pure.

    product       FLOPs / (share x peak), the share by its smallest size; longer if its rows are misaligned
    attention     FLOPs / (share x peak), another share backward
    elementwise   bytes / (share x bandwidth), the update's share is its own
    collective    bytes / (share x bandwidth of the links)

and none takes less than a device needs between two small kernels; on a CPU each takes its start besides. The shares are
a row's (`ReachedRates`). Those of GPUs were measured on one H200 with a sketch of this program (products 693 of 989
TFLOP/s, elementwise kernels 3.8 of 4.8 TB/s, cuDNN's attention); those of narrow products, of misaligned ones and of
collectives are guesses. No line of it was measured on a GPU with this code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallel3d.rehearsal.device_rows import DeviceRow, peak_flops
from parallel3d.rehearsal.kernel_counts import KernelCounts, KernelWork

UPDATE_KERNEL = "_update_range"
RESERVED_GIB = 2.5
"""Memory beyond the tensors: the CUDA context, workspaces of cuBLAS and cuDNN, what the allocator can't use."""


def kernel_s(work: KernelWork, device: DeviceRow) -> float:
    """Seconds of one kernel on the device."""
    peak, rates = peak_flops(device, work.itemsize), device.rates
    memory_s = work.num_bytes / (rates.elementwise * device.bandwidth)
    if work.kind == "product":
        share = rates.wide_product if work.narrowest >= rates.wide_from else rates.narrow_product
        factor = 1.0 if work.is_aligned else rates.misaligned_factor
        limit_s = max(factor * work.flops / (share * peak), memory_s)
    elif work.kind == "collective":
        limit_s = work.num_bytes / (rates.collective * device.link_bandwidth)
    elif work.kind == "elementwise":
        share = rates.update if work.name == UPDATE_KERNEL else rates.elementwise
        limit_s = work.num_bytes / (share * device.bandwidth)
    else:
        share = rates.attention if work.kind == "attention" else rates.attention_backward
        limit_s = work.flops / (share * peak)
    return max(rates.kernel_s, limit_s) + rates.dispatch_s


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
        idle_s=max(0.0, counts.num_kernels * device.rates.launch_s - device_s) + counts.num_waits * device.rates.wait_s,
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
        return self.device.rates.step_idle_s + sum(phase.total_s for phase in self.phases.values())

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
