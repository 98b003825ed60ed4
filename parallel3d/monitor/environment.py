"""Describes what a run runs on: versions, machine, commit, command line and working directory. Does not import torch.

Nothing else of the process goes in: its environment variables may hold secrets. Users and queries of addresses are left
out of the command line, which may be that of a training script of the user's own.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from parallel3d.remote_address import without_secrets

PACKAGES = ("parallel3d", "torch", "numpy", "sentencepiece", "pyarrow", "pydantic")
GIT_TIMEOUT_S = 5.0


def describe_environment(command_line: Sequence[str]) -> dict[str, Any]:
    """The contents of environment.json; unknown facts are None."""
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": [without_secrets(word) for word in command_line],
        "working_directory": _working_directory(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu_model": describe_cpu(),
        "num_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain")),
    }


def describe_cpu() -> str | None:
    """The processor's name with its family and model numbers, by which generations of one name differ; None if
    unknown."""
    return cpu_name(*(_proc_value("/proc/cpuinfo", field) for field in ("model name", "cpu family", "model")))


def cpu_name(name: str | None, family: str | None, model: str | None) -> str | None:
    """One text of what /proc/cpuinfo has; other vendors than Intel and AMD have no such numbers there."""
    return f"{name} (family {family}, model {model})" if name and family and model else name


def _working_directory() -> str | None:
    """The folder at which relative paths of the command line start."""
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _proc_value(path: str, name: str) -> str | None:
    """The value of the first `name : value` line of a file under /proc."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None)


def _memory_bytes() -> int | None:
    value = _proc_value("/proc/meminfo", "MemTotal")
    return int(value.split()[0]) * 1024 if value else None


def _git(*arguments: str) -> str | None:
    """Output of git in the checkout that holds this file; None if it fails."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
