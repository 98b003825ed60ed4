"""The cores whose time a host's processes may use: those of the machine, or fewer in a container."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(root: Path = CGROUP) -> int:
    """The machine's cores, or what the cgroup allows, rounded down, where that is less (`docker run --cpus 4`, CPU
    limits of Kubernetes). At least 1. Affinity is left out: launchers often give each process cores of its own."""
    cores, quota = os.cpu_count() or 1, read_cgroup_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def read_cgroup_quota(root: Path = CGROUP) -> float | None:
    """The cores whose time the cgroup allows, by version 2 or 1; None: all."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None
