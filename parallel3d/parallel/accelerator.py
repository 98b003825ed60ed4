"""The device of a thread."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Makes `device` the calling thread's own; for a CPU there is nothing to do.

    To be the first call of each thread that may touch a device: otherwise CUDA makes a context for it on GPU 0, some
    0.5 GB for every rank of the host.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
