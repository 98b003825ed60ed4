"""Folders of the cache that are built once, by the first process that needs them, while the others wait.

<folder>.lock       held by the one process that builds
<folder>.building/  what it has written so far; a dead builder's is thrown away by the next
<folder>/           complete, since it gets its name in one rename
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel3d.errors import DataError
from parallel3d.parallel.abort import POLL_S, AbortToken

LOCK_LOG_AFTER_S = 30.0  # of waiting for another process before this one says so


def build_once(folder: Path, build: Callable[[Path], None], token: AbortToken, log: Callable[[str], None]) -> None:
    """Lets `build` fill an empty folder, which is then renamed to `folder`; does nothing if `folder` exists.

    Raises DataError if the disk can't be written, GenerationEnded once the token is aborted.
    """
    if folder.is_dir():
        return
    with locked(folder.with_suffix(".lock"), token, log):
        if folder.is_dir():
            return
        scratch = folder.with_suffix(".building")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir()
            build(scratch)
            os.replace(scratch, folder)
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)  # it may have filled the disk
            raise DataError(
                f"can't write the corpus cache ({error}): make room, or set data.cache_directory to another disk"
            ) from error


@contextmanager
def locked(path: Path, token: AbortToken, log: Callable[[str], None]) -> Iterator[None]:
    """Holds the file lock at `path`; the system releases that of a dead process.

    Raises DataError if there can be none, GenerationEnded once the token is aborted.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise DataError(
            f"can't write the corpus cache ({error}): set data.cache_directory to a folder of yours"
        ) from error
    with file:
        since, is_logged = time.monotonic(), False
        while not _try_lock(file.fileno()):
            if not is_logged and time.monotonic() - since >= LOCK_LOG_AFTER_S:
                log(f"waiting for another process that builds {path.stem}")
                is_logged = True
            token.sleep(POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
