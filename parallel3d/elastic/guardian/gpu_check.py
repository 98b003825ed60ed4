"""Refuses a run that asks for GPUs that this host does not have, before any process of it is started.

The GPUs are counted in a process of its own: this one forks the workers, and a driver does not survive a fork.
"""

from __future__ import annotations

import subprocess
import sys
import time

from parallel3d.config.schema import Config
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.errors import ConfigError, Problem

COUNT = "import torch; print(torch.cuda.device_count())"
LIMIT_S = 60.0
LATER_S = 10.0
"""What other processes of a launcher wait for the host's first one, which prints the error: the end of any has the
launcher end them all."""


def check_gpus(config: Config, env: LauncherEnv | None, num_workers: int) -> None:
    """Raises ConfigError if `run.device` is cuda or cuda_shared and this host lacks the GPUs for its workers, of which
    the run has `num_workers`, all of them here without a launcher."""
    if config.run.device not in ("cuda", "cuda_shared"):
        return
    num_here = num_workers if env is None else env.local_world_size or 1
    num_gpus = count_gpus()
    if num_gpus is not None:
        num_needed = num_gpus_needed(config.run.device, num_gpus, num_here, by_launcher=env is not None)
        if num_gpus < num_needed:
            if env is not None and env.local_rank > 0:
                time.sleep(LATER_S)
            raise ConfigError([_describe(config.run.device, num_gpus, num_needed)])


def num_gpus_needed(device: str, num_gpus: int, num_workers: int, *, by_launcher: bool) -> int:
    """Returns how many of the host's GPUs this process must see. A launcher may show each process its own one alone."""
    shows_one = by_launcher and num_gpus == 1
    return 1 if device == "cuda_shared" or shows_one else num_workers


def count_gpus() -> int | None:
    """Returns the GPUs that a worker started from here would see; None if that can't be found out."""
    try:
        done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=LIMIT_S)
        return int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None  # workers will say why


def _describe(device: str, num_gpus: int, num_needed: int) -> Problem:
    needed = "a GPU" if num_needed == 1 else f"{num_needed} GPUs, one for each worker of this host"
    return Problem(
        field="run.device",
        value=device,
        rule=f"needs {needed}, and torch finds {num_gpus} here",
        fix="Set run.device to cpu or auto" + (", or start fewer workers on this host" if num_gpus else ""),
    )
