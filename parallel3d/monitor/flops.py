"""Model FLOPs utilisation (MFU; PaLM, Chowdhery et al. 2022, appendix B). Pure.

    MFU = tokens/s * FLOPs per token / (devices * peak FLOP/s of a device)

FLOPs per token are those of the model alone (`config.derived.flops_per_token`); recomputation does not count. The peak
is the vendor's figure for dense products in the format in which the model computes. For CPUs and for devices missing
from the table it is measured at the start, with the layers' own matrix product, and MFU is relative to that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

TERA = 1e12

_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("GB200", {"bf16": 2500, "fp16": 2500, "fp32": 80, "fp64": 40}),
    ("B200", {"bf16": 2250, "fp16": 2250, "fp32": 75, "fp64": 37}),
    ("H200", {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9, "fp64": 66.9}),
    ("GH200", {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9, "fp64": 66.9}),
    ("H100 PCIe", {"bf16": 756.4, "fp16": 756.4, "fp32": 51.2, "fp64": 51.2}),
    ("H100 NVL", {"bf16": 835.5, "fp16": 835.5, "fp32": 60.0, "fp64": 60.0}),
    ("H100", {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9, "fp64": 66.9}),
    ("A100", {"bf16": 312, "fp16": 312, "fp32": 19.5, "fp64": 19.5}),
    ("A40", {"bf16": 149.7, "fp16": 149.7, "fp32": 37.4}),
    ("A10G", {"bf16": 70, "fp16": 70, "fp32": 35}),
    ("A10", {"bf16": 125, "fp16": 125, "fp32": 31.2}),
    ("L40S", {"bf16": 362, "fp16": 362, "fp32": 91.6}),
    ("L40", {"bf16": 181, "fp16": 181, "fp32": 90.5}),
    ("L4", {"bf16": 121, "fp16": 121, "fp32": 30.3}),
    ("RTX 4090", {"bf16": 165.2, "fp16": 165.2, "fp32": 82.6}),
    ("RTX 3090", {"bf16": 71, "fp16": 71, "fp32": 35.6}),
    ("V100", {"fp16": 125, "fp32": 15.7, "fp64": 7.8}),
    ("T4", {"fp16": 65, "fp32": 8.1}),
)
"""TFLOP/s of dense products, from the vendors' data sheets; the first row whose words are in the device's name counts.
fp32 without TF32; bf16 and fp16 with fp32 accumulation; no sparsity."""

PeakSource = Literal["configuration", "data sheet", "measured"]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak FLOP/s of one rank's device, and where the figure is from."""

    flops_per_s: float
    source: PeakSource


def data_sheet_peak(device_name: str, number_format: str) -> Peak | None:
    """The data sheet's peak for a device name of torch and a format ("fp32", "bf16", ...); None if not listed."""
    for part, peaks in _PEAKS:
        if re.search(rf"\b{part}\b", device_name):
            value = peaks.get(number_format)
            return Peak(flops_per_s=value * TERA, source="data sheet") if value is not None else None
    return None


def mfu(*, flops_per_s: float, num_devices: int, peak: Peak) -> float:
    """The model's `flops_per_s` (tokens/s x FLOPs per token) as a share of the devices' peak."""
    return flops_per_s / (num_devices * peak.flops_per_s)


def describe_mfu(value: float, peak_flops_per_s: float | None, source: PeakSource | None) -> str:
    """For example "41.3%". No run exceeds its device's peak: above 100 %, says that the peak is wrong."""
    if value <= 1.0 or peak_flops_per_s is None:
        return f"{value:.1%}"
    peak = f"{peak_flops_per_s / 1e9:,.0f} GFLOP/s per rank"
    if source == "measured":
        return f"unknown: above the peak of {peak}, which was measured under load; set monitor.peak_flops"
    return f"unknown: above the peak of {peak} ({source}), which is too low for this device; set monitor.peak_flops"
