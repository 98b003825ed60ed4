"""Copies of the project with files added or changed as docs/extending.md describes it, and commands that run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "extending.md"


def make_copy(folder: Path, changed: dict[str, str]) -> Path:
    """The project in `folder`, with `changed` files (path: content); every other file is a link to the original."""
    folder.mkdir()
    for name in ("parallel3d", "tests", "configs", "launch", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for path, content in changed.items():
        file = folder / path
        _make_real(file.parent, folder)
        file.unlink(missing_ok=True)
        file.write_text(content)
    return folder


def _make_real(directory: Path, folder: Path) -> None:
    """Turns a linked directory, and those above it up to `folder`, into directories of links."""
    if directory == folder:
        return
    _make_real(directory.parent, folder)
    if directory.is_symlink():
        original = directory.resolve()
        directory.unlink()
        directory.mkdir()
        for entry in original.iterdir():
            if entry.name != "__pycache__":
                (directory / entry.name).symlink_to(entry)


def run_module(copy: Path, module: str, *arguments: str) -> str:
    """The output of `python -m MODULE` in the copy."""
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compare_with_one_process(copy: Path, layouts: dict[str, dict[str, Any]], **changes: dict[str, Any]) -> Any:
    """Trains the layouts (name: fields of `parallel`) and one process in the copy.

    Returns the findings by layout, and as "losses" those of one process; `changes` are the configuration's, by section.
    """
    return json.loads(run_module(copy, "tests.extending.compare_layouts", json.dumps([layouts, changes])))
