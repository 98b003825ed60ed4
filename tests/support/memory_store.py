"""A remote store in memory that counts its changes, and can fail, hold back bytes or end at any of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

SECRET = "AKIA5SECRET0KEY99XYZ"


class Killed(BaseException):
    """The process is gone."""


class CountedStore(MemoryFileSystem):
    """Each change is one operation; from the `last`-th on all raise, and a write has got half of its data out."""

    protocol = "counted"
    store, pseudo_dirs = {}, [""]
    names: list[str] = []
    last, failures, lost_bytes = 10**9, 0, 0
    on_operation: Callable[[str, str], None] = staticmethod(lambda name, path: None)

    @classmethod
    def reset(cls) -> str:
        """Makes it a store without faults; returns a new address."""
        cls.names, cls.last, cls.failures, cls.lost_bytes = [], 10**9, 0, 0
        cls.on_operation = staticmethod(lambda name, path: None)
        return f"counted://bucket/{uuid.uuid4().hex}"

    @classmethod
    def count(cls, name: str, path: str) -> None:
        cls.names.append(name)
        if len(cls.names) >= cls.last:
            raise Killed
        cls.on_operation(name, path)
        if cls.failures:
            cls.failures -= 1
            raise ConnectionError(f"the store at https://user:{SECRET}@host said no to {SECRET}")

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def _open(self, path, mode="rb", data=None, **options):
        if mode != "wb":
            return super()._open(path, mode, **options)
        self.count("create", path)
        file = CountedFile(self, path)
        file.commit()
        if data is not None:  # of pipe_file
            file.write(data)
        return file

    def makedirs(self, path, exist_ok=False):
        self.count("makedirs", path)
        super().makedirs(path, exist_ok=exist_ok)

    def rm_file(self, path):
        self.count("rm_file", path)
        super()._rm(path)

    def rm(self, path, recursive=False, maxdepth=None):
        self.count("rm", path)
        super().rm(path, recursive=recursive, maxdepth=maxdepth)


class CountedFile(MemoryFile):
    def write(self, data):
        try:
            CountedStore.count("write", self.path)
        except Killed:
            super().write(data[: len(data) // 2])
            raise
        super().write(data[: len(data) - CountedStore.lost_bytes])
        return len(data)


def register() -> None:
    fsspec.register_implementation("counted", CountedStore, clobber=True)


def files_of(address: str) -> dict[str, bytes]:
    """All files below an address, by their paths relative to it."""
    fs, path = fsspec.core.url_to_fs(address)
    return {name[len(path) :].strip("/"): fs.store[name].getvalue() for name in fs.find(path)}
