"""A copy of the repository, made of links, to which a file has been added: what an extension in place is tested in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def add_file(overlay: Path, folder: str, file: Path) -> None:
    """Makes `overlay` a copy of the repository with `file` in `folder`: folders on the way there are new, all else is
    linked."""
    here, there = overlay, ROOT
    for part in (*Path(folder).parts, None):
        here.mkdir(exist_ok=True)
        for entry in there.iterdir():
            if entry.name not in (part, "__pycache__", ".git"):
                (here / entry.name).symlink_to(entry)
        if part is not None:
            here, there = here / part, there / part
    (here / file.name).symlink_to(file)


def run_module(overlay: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module` in the copy; its output is in the result."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=overlay,
        env={**os.environ, "PYTHONPATH": str(overlay)},
        capture_output=True,
        text=True,
        timeout=120,
    )
