"""Chooses and initialises a worker's device, and its CPU threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from parallel3d.config.schema import Config
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.errors import ConfigError, Problem
from parallel3d.parallel.nccl_group import NCCL_ENVIRONMENT
from parallel3d.usable_cores import usable_cores

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def choose_device(
    config: Config, local_rank: int, local_world_size: int, *, has_own_device: bool = False
) -> torch.device:
    """Returns the device that `run.device` means on this machine; raises ConfigError if there is none.

    has_own_device: the launcher shows each process a single GPU, another one to each.
    """
    wanted, num_devices = config.run.device, torch.cuda.device_count()
    if wanted != "cpu" and has_own_device:
        return torch.device("cuda", 0)
    if wanted == "cpu" or (wanted == "auto" and num_devices < local_world_size):
        return torch.device("cpu")
    if wanted == "cuda_shared" and num_devices > 0:
        return torch.device("cuda", local_rank % num_devices)
    if local_rank >= num_devices:
        rule = f"local rank {local_rank} has no device: {num_devices} found"
        fix = "Start fewer workers on this host, or set run.device to cpu"
        raise ConfigError([Problem(field="run.device", value=wanted, rule=rule, fix=fix)])
    return torch.device("cuda", local_rank)


def exchange_device_ids(context: WorkerContext) -> list[str]:
    """Returns what each worker of this host sees: the id of its only GPU, or "" with none or several."""
    only = torch.cuda.get_device_properties(0) if torch.cuda.device_count() == 1 else None
    own = "" if only is None else str(getattr(only, "uuid", ""))
    context.control.set(f"device/{context.host}/{context.local_rank}", own.encode())
    if not own or context.local_world_size == 1:
        return [own]
    keys = [f"device/{context.host}/{local_rank}" for local_rank in range(context.local_world_size)]
    return [value.decode() for value in context.control.get_all(keys, context.control.token)]


def are_own_devices(device_ids: Sequence[str], local_world_size: int) -> bool:
    """Whether several workers of a host see one GPU each, and no two the same: so does srun --gpus-per-task=1."""
    return local_world_size > 1 and "" not in device_ids and len(set(device_ids)) == local_world_size


def init_device(device: torch.device, *, deterministic: bool = False, kernels: Path | None = None) -> None:
    """Makes the device this process's own; call it before the device is used.

    Kernels are compiled in this process: helper processes would outlive a worker that is killed. They are kept in the
    folder `kernels`, so that the next start finds them; torch's own place is a temporary folder.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if kernels is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels / "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", str(kernels / "triton"))
    if device.type != "cuda":
        return
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        # reshards and growing sequences would leave holes of the wrong sizes in a device that is nearly full
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")  # read when cuBLAS makes its first handle
        torch.use_deterministic_algorithms(True)
        # it would fill every buffer that is about to be written
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.set_device(device)


def describe_device(device: torch.device) -> dict[str, object]:
    """Facts for environment.json; empty for a CPU, which the launcher describes."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "device_memory_bytes": properties.total_memory,
        "device_capability": f"{properties.major}.{properties.minor}",
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The driver's own line; None where it does not say."""
    try:
        return path.read_text().splitlines()[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return None


def choose_num_threads(config: Config, local_world_size: int) -> int:
    """Returns the CPU threads of this rank; with exact sums independent of the layout, since some kernels sum by
    thread."""
    if config.run.threads_per_rank is not None:
        return config.run.threads_per_rank
    return 1 if config.precision.sums == "exact" else max(1, usable_cores() // local_world_size)
