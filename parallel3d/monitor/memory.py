"""How much memory this process holds."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def reset_peak_memory(device: torch.device) -> None:
    """From now on `used_bytes` is of what comes: not of the start, when initial weights are held besides."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def used_bytes(device: torch.device) -> int:
    """Of a GPU the most that torch has had allocated at once; else the resident memory of the process, now (where the
    system does not tell, the most so far)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
