"""Measures the memory of this process."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def reset_peak_memory(device: torch.device) -> None:
    """Restarts torch's peak on a GPU, to leave out the start, when initial weights exist twice."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def used_bytes(device: torch.device) -> int:
    """Bytes in use: on a GPU torch's peak allocation; else the resident memory of the process, now (its peak on systems
    without /proc)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
