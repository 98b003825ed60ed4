"""Limits of the machine: copies, products, attention; and whether operators that we rely on are there."""

from __future__ import annotations

import importlib.metadata
import subprocess
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.device.our_steps import synchronize
from benchmarks.device.part_process import Part
from parallel3d.worker.device import describe_device

PACKAGES = ("torch", "triton", "pydantic", "liger-kernel", "torchtitan", "transformers", "pytest", "numpy")
CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu"
"""And what holds them down now: clocks_throttle_reasons.active."""


def measure_limits(part: Part) -> None:
    """A line for each figure."""
    part.write(versions=versions(), device=describe_device(part.device), threads=torch.get_num_threads())
    part.write(clocks_idle=clocks(part))
    part.write(addmm_into_fp32=outcome_of(lambda: add_in_fp32(part.device)))
    size = 512 if part.is_smoke else 8192
    a, b = (torch.randn(size, size, device=part.device).bfloat16() for _ in range(2))
    part.write(bf16_product_tflops=2 * size**3 / seconds_of(part, lambda: a @ b) / 1e12, size=size)
    part.write(clocks_after_products=clocks(part))
    flat = torch.empty((1 if part.is_smoke else 1024) << 20, dtype=torch.uint8, device=part.device)
    other = torch.empty_like(flat)
    part.write(copy_tb_per_s=2 * flat.nbytes / seconds_of(part, lambda: other.copy_(flat)) / 1e12)
    small = torch.zeros(16, device=part.device)
    part.write(launch_us=1e6 * seconds_of(part, lambda: [small.add_(1) for _ in range(1000)]) / 1000)
    for head_size in (64, 128):
        part.write(head_size=head_size, **measure_attention(part, head_size))


def versions() -> dict[str, str]:
    """Versions of the packages that are there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def clocks(part: Part) -> str:
    """Clocks (MHz), power (W), temperature and what holds them down, by the driver's tool: visits differ by them."""
    if part.device.type != "cuda":
        return "no GPU"
    fields = f"{CLOCKS},clocks_throttle_reasons.active"
    command = ["nvidia-smi", f"--id={part.device.index}", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout.strip() or done.stderr.strip()


def measure_attention(part: Part, head_size: int) -> dict[str, object]:
    """Causal attention in bf16: TFLOP/s of both passes, and the operator that torch takes."""
    batch, heads, length = (1, 2, 64) if part.is_smoke else (4, 4096 // head_size, 4096)
    shape = (batch, heads, length, head_size)
    q, k, v = (torch.randn(shape, device=part.device).bfloat16().requires_grad_() for _ in range(3))
    forward_flops = 2 * batch * heads * length * length * head_size

    def forward() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    gradient = torch.ones_like(q)
    forward_s = seconds_of(part, forward)
    both_s = seconds_of(part, lambda: forward().backward(gradient))
    return {
        "operator": type(forward().grad_fn).__name__,
        "forward_tflops": forward_flops / forward_s / 1e12,
        "backward_tflops": 2.5 * forward_flops / max(both_s - forward_s, 1e-9) / 1e12,
    }


def add_in_fp32(device: torch.device) -> None:
    """An fp32 total plus a product of bf16 factors, without a temporary."""
    total = torch.zeros(64, 64, device=device)
    a = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    torch.addmm(total, a, a, out_dtype=torch.float32, out=total)


def outcome_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "works"


def seconds_of(part: Part, action: Callable[[], object], repeats: int = 10) -> float:
    """The fastest of three rounds, a call."""
    action()
    best = float("inf")
    for _ in range(1 if part.is_smoke else 3):
        synchronize(part.device)
        started = time.perf_counter()
        for _ in range(repeats):
            action()
        synchronize(part.device)
        best = min(best, (time.perf_counter() - started) / repeats)
    return best
