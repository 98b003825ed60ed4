"""Chooses and initialises a worker's device, and its CPU threads."""

from __future__ import annotations

import os

import torch

from parallel3d.config.schema import Config
from parallel3d.errors import ConfigError, Problem
from parallel3d.parallel.nccl_group import NCCL_ENVIRONMENT


def choose_device(config: Config, local_rank: int, local_world_size: int) -> torch.device:
    """Returns the device that `run.device` means on this machine; raises ConfigError if there is none."""
    wanted, num_devices = config.run.device, torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_devices < local_world_size):
        return torch.device("cpu")
    if wanted == "cuda_shared" and num_devices > 0:
        return torch.device("cuda", local_rank % num_devices)
    if local_rank >= num_devices:
        rule = f"local rank {local_rank} has no device: {num_devices} found"
        fix = "start fewer workers on this host, or set run.device to cpu"
        raise ConfigError([Problem(field="run.device", value=wanted, rule=rule, fix=fix)])
    return torch.device("cuda", local_rank)


def init_device(device: torch.device) -> None:
    """Makes the device this process's own; call it before the device is used.

    Kernels are compiled in this process: helper processes would outlive a worker that is killed.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if device.type == "cuda":
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)


def choose_num_threads(config: Config, local_world_size: int) -> int:
    """Returns the CPU threads of this rank; with exact sums independent of the layout, since some kernels sum by
    thread."""
    if config.run.threads_per_rank is not None:
        return config.run.threads_per_rank
    return 1 if config.precision.sums == "exact" else max(1, (os.cpu_count() or 1) // local_world_size)
