"""trackers.json in the run folder: each tracker's own name of the run, with which a resumed run goes on there."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

TRACKER_IDS = "trackers.json"


def read_run_id(folder: Path, tracker: str) -> str | None:
    return _read(folder / TRACKER_IDS).get(tracker)


def write_run_id(folder: Path, tracker: str, run_id: str) -> None:
    """Keeps the names of other trackers, whose processes may write at the same time."""
    path, temporary = folder / TRACKER_IDS, folder / f".{TRACKER_IDS}"
    with temporary.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # bounded: others hold it while they write a small file
        temporary.write_text(json.dumps(_read(path) | {tracker: run_id}, indent=2) + "\n")
        os.replace(temporary, path)


def _read(path: Path) -> dict[str, str]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
