"""Where a step's time goes on the device, by kind of kernel, beside what the rehearsal predicts."""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.device.our_steps import build_rank, synchronize
from benchmarks.device.part_process import Part
from benchmarks.device.workloads import SMOKE, load_workload
from parallel3d.config.schema import Config
from parallel3d.models.make import make_stage
from parallel3d.rehearsal.device_rows import DEVICE_ROWS, DeviceRow
from parallel3d.rehearsal.meta_rank import LayeredRehearsal
from parallel3d.rehearsal.roofline import kernel_s
from parallel3d.trainer.step import train_step

WORKLOADS_TO_PROFILE = ("hlat_7b", "gpt2_124m")
NUM_STEPS = 2
KINDS = (
    ("product", re.compile(r"gemm|nvjet|cutlass|xmma|cublas|::mm|addmm", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|sdpa|cudnn.*attention|scaled_dot_product", re.IGNORECASE)),
    ("update", re.compile(r"adamw|update", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy|memset", re.IGNORECASE)),
)
"""Kind of a kernel by its name: the first that fits; all others are elementwise."""
TRACE_BYTES = 15 << 20


def profile_steps(part: Part) -> None:
    """Two steps of each workload: seconds by kind, the longest kernels, predicted seconds, and the trace."""
    for name in WORKLOADS_TO_PROFILE:
        config = load_workload(name, SMOKE[name] if part.is_smoke else ())
        part.write(workload=name, predicted_ms=predicted_ms(config, row_of(part.device)))
        step = partial(train_step, build_rank(config, part.device))
        step()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if part.device.type == "cuda" else [])]
        synchronize(part.device)
        with profile(activities=activities) as profiler:
            for _ in range(NUM_STEPS):
                step()
            synchronize(part.device)
        part.write(workload=name, **by_kind(profiler, part.device))
        write_trace(profiler, part.folder / f"trace-{name}.json.gz")
        del step


def by_kind(profiler: profile, device: torch.device) -> dict[str, object]:
    """Milliseconds of a step by kind of kernel, and the longest kernels."""
    own = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    times: dict[str, float] = defaultdict(float)
    kernels = []
    for event in profiler.key_averages():
        if device.type == "cuda" and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        milliseconds = getattr(event, own) / 1e3 / NUM_STEPS
        times[kind_of(event.key)] += milliseconds
        kernels.append((milliseconds, event.count // NUM_STEPS, event.key[:90]))
    longest = [[round(ms, 3), count, key] for ms, count, key in sorted(kernels, reverse=True)[:25]]
    return {"ms": {kind: round(ms, 2) for kind, ms in times.items()}, "longest": longest}


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(kernel)), "elementwise")


def predicted_ms(config: Config, row: DeviceRow) -> dict[str, float]:
    """The rehearsal's milliseconds by kind; those of the update by the part of the step."""
    times: dict[str, float] = defaultdict(float)
    for name, counts in LayeredRehearsal.of(config, make_stage).whole.phases.items():
        for work, count in counts.works.items():
            kind = "update" if name == "update" else work.kind.removesuffix("_backward")
            times[kind] += 1e3 * count * kernel_s(work, row)
    return {kind: round(ms, 2) for kind, ms in times.items()}


def row_of(device: torch.device) -> DeviceRow:
    """The device's row, by its name; the last one for a device without one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((row for row in DEVICE_ROWS if row.name in name), DEVICE_ROWS[-1])


def write_trace(profiler: profile, path: Path) -> None:
    """Writes the trace for Chrome or Perfetto, unless it is too large to be brought home."""
    with TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        packed = gzip.compress(plain.read_bytes())
    if len(packed) <= TRACE_BYTES:
        path.write_bytes(packed)
