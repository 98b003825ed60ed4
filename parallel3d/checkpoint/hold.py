"""Keeps a checkpoint's files while another process reads them, although the run removes the checkpoint. No torch.

A folder next to it, with a name that no part of the run looks at, has hard links to its files, and its index.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel3d.checkpoint.index import INDEX, decode_index


@contextmanager
def hold_checkpoint(path: Path, suffix: str) -> Iterator[tuple[Path | None, bytes]]:
    """A folder with the checkpoint's files, which the run does not remove, and its index; None if it is gone.

    Without hard links it is the checkpoint itself, which may be removed meanwhile. One process at a time may use a
    suffix. Raises CheckpointError if the index is damaged.
    """
    release_checkpoints(path.parent, suffix)
    held = path.with_name(path.name + suffix)
    try:
        data = (path / INDEX).read_bytes()
        index = decode_index(data, str(path / INDEX))
        held.mkdir()
        for file in index.files:
            os.link(path / file.name, held / file.name)
        (held / INDEX).write_bytes(data)
    except FileNotFoundError:
        release_checkpoints(path.parent, suffix)
        yield None, b""
        return
    except OSError:  # no hard links here
        release_checkpoints(path.parent, suffix)
        held = path
    try:
        yield held, data
    finally:
        release_checkpoints(path.parent, suffix)


def release_checkpoints(directory: Path, suffix: str) -> None:
    """Removes what is held with this suffix; a process that was killed leaves it."""
    for path in directory.glob(f"step-*{suffix}"):
        shutil.rmtree(path, ignore_errors=True)
