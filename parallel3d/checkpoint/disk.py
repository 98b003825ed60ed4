"""The file operations of a save, one method each, so that tests can end a save between any two of them.

A file is synced before it is renamed or linked, and its folder after: whatever exists after a crash is whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from parallel3d.errors import CheckpointError


class Disk:
    """The file system; every method but `tree` is one change to it."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        """Opens a new or emptied file for writing."""
        with path.open("wb", buffering=0) as file:
            yield file

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        """Writes all of the data; a single write may take only part of it."""
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def sync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Makes new and changed names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        os.replace(path, target)

    def link(self, target: str, path: Path) -> None:
        """Creates a symbolic link at `path`."""
        os.symlink(target, path)

    def remove_file(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """Removes a folder with its contents."""
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self.remove_tree(entry)
            else:
                self.remove_file(entry)
        self.remove_folder(path)

    def write_file(self, path: Path, data: bytes) -> None:
        """Writes and syncs a small file."""
        with self.create(path) as file:
            self.write(file, data)
            self.sync(file)


def refuse_existing(target: Path) -> None:
    """Raises CheckpointError if the folder to create exists; also called before long work."""
    if target.exists():
        raise CheckpointError(f"{target} exists: nothing is overwritten, name another folder")


@contextmanager
def new_folder(disk: Disk, target: Path) -> Iterator[Path]:
    """Yields a folder to fill, which becomes `target` at the end: it appears whole or not at all.

    An error leaves nothing; a kill leaves `target`.partial, which the next attempt removes. Raises CheckpointError if
    `target` exists.
    """
    refuse_existing(target)
    partial = target.with_name(f"{target.name}.partial")
    if partial.exists():
        disk.remove_tree(partial)
    disk.make_folder(partial)
    try:
        yield partial
        disk.sync_folder(partial)
        disk.rename(partial, target)
    except BaseException:
        with suppress(OSError):  # the next attempt removes it
            disk.remove_tree(partial)
        raise
    disk.sync_folder(target.parent)
