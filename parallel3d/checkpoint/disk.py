"""The operations on files that a save is made of, one method each: tests end a save between any two of them.

What is renamed or linked has been synced before, and the folder is synced after: what is there after a crash is whole.
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
        """A new file, or an emptied one, open for writing."""
        with path.open("wb", buffering=0) as file:
            yield file

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        """All of the data: a write may take less than it is given."""
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def sync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Names that were made or changed in a folder stay."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        os.replace(path, target)

    def link(self, target: str, path: Path) -> None:
        """A symbolic link at `path`."""
        os.symlink(target, path)

    def remove_file(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """A folder and all that is in it."""
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self.remove_tree(entry)
            else:
                self.remove_file(entry)
        self.remove_folder(path)

    def write_file(self, path: Path, data: bytes) -> None:
        """A whole small file, synced."""
        with self.create(path) as file:
            self.write(file, data)
            self.sync(file)


def refuse_existing(target: Path) -> None:
    """Raises CheckpointError where the folder to make is there already: before long work, too."""
    if target.exists():
        raise CheckpointError(f"{target} exists: nothing is overwritten, name another folder")


@contextmanager
def new_folder(disk: Disk, target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when that is done: it is whole or not there.

    What ends it early leaves nothing; what kills it leaves `target`.partial, which the next attempt removes. Raises
    CheckpointError where `target` exists.
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
