"""Finds the peak FLOP/s of this rank's device: configured, from a data sheet, or measured."""

from __future__ import annotations

import time

import torch

from parallel3d.accelerator import accelerator_of
from parallel3d.compiled_loops import multiplies_bf16
from parallel3d.config.schema import Config
from parallel3d.layers.gemm import Library, matmul
from parallel3d.monitor.flops import Peak, data_sheet_peak
from parallel3d.precision.dtypes import FORMAT_OF
from parallel3d.precision.policy import policy_of

MATRIX_SIZES = {"cpu": 512, "cuda": 8192}
MEASURED_S = 0.05


def find_peak(config: Config, device: torch.device) -> Peak:
    """The peak for MFU. Ranks that share a machine's cores call it together, so that each measures its share."""
    if config.monitor.peak_flops is not None:
        return Peak(flops_per_s=config.monitor.peak_flops, source="configuration")
    number_format = policy_of(config.precision).compute
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return data_sheet_peak(name, FORMAT_OF[number_format].name) or measure_peak(device, number_format)


def measure_peak(device: torch.device, number_format: torch.dtype) -> Peak:
    """Measures large matrix products with the layers' kernel for MEASURED_S; without instructions for bf16 these widen.

    Other load on the machine makes the figure too low, which shows as an MFU above 100 % (flops.describe_mfu).
    """
    accelerator = accelerator_of(device)
    size = MATRIX_SIZES.get(device.type, 512)
    is_widened = number_format is torch.bfloat16 and not multiplies_bf16()
    library: Library = "widened" if is_widened else "onednn"
    matrix = torch.full((size, size), 0.5, dtype=number_format, device=device)

    def multiply() -> None:
        matmul(matrix, matrix, library)
        if accelerator is not None:
            accelerator.synchronize()  # bounded: its own product

    multiply()  # warm-up: threads start, kernels are built
    num_products, started = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started) < MEASURED_S:
        multiply()
        num_products += 1
    return Peak(flops_per_s=num_products * 2.0 * size**3 / elapsed_s, source="measured")
