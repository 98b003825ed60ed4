"""Checkpoints in a remote store: which are complete, how one is sent, fetched and removed.

    <address>/step-00000200-1b2c3d4e/rank-00000.safetensors ...    the files of the checkpoint, then
                                     index.json                    written last: with it the checkpoint is complete
                                     index.previous.json           in its place: the run did not go on from it

The folder's name has the first digits of the index's hash, so that two checkpoints of a step never mix, and an upload
that was interrupted goes on with the files that are missing. A checkpoint is removed from its index on. What counts is
the index with its own hash, and each file that it lists in its full size; fetching verifies every byte. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from parallel3d.checkpoint.checksum import Checksum, checksum_of
from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.index import INDEX, Index, IndexedFile, decode_index
from parallel3d.errors import CheckpointError
from parallel3d.parallel.abort import AbortToken
from parallel3d.remote_address import redacted
from parallel3d.remote_files import CHUNK_BYTES, PACKAGES, Log, TransferError, attempt, open_store, problem_of

PREVIOUS = "index.previous.json"
PROBE = ".parallel3d-probe"
IDENTITY_DIGITS = 8

_NAME = re.compile(rf"step-(\d{{8,}})-[0-9a-f]{{{IDENTITY_DIGITS}}}")
_HASH = re.compile(rb'\{"sha256": "([0-9a-f]{64})"')


class RemoteDamage(CheckpointError):
    """A checkpoint in a store is damaged; an older one may be whole."""


@dataclass(frozen=True, kw_only=True)
class RemoteCheckpoint:
    """A folder of the store, complete or not."""

    name: str
    """"": the address itself is a checkpoint."""
    sizes: Mapping[str, int | None]
    """Its files."""

    @property
    def step(self) -> int:
        return step_of(self.name)

    @property
    def is_listed(self) -> bool:
        """Whether it has an index."""
        return INDEX in self.sizes

    @property
    def num_bytes(self) -> int:
        return sum(size or 0 for size in self.sizes.values())


def step_of(name: str) -> int:
    """The step of a folder's name; -1 if it is not that of a checkpoint."""
    named = _NAME.fullmatch(name)
    return int(named[1]) if named else -1


def remote_name(step: int, index_bytes: bytes) -> str:
    """The name of a checkpoint's folder in a store."""
    found = _HASH.match(index_bytes)
    if found is None:
        raise CheckpointError(f"the index of step {step} is damaged: it is not what was written")
    return f"step-{step:08}-{found[1].decode()[:IDENTITY_DIGITS]}"


class RemoteDirectory:
    """The checkpoints at an address. Every operation is tried again after what may pass; then CheckpointError.

    log: gets a line per retry. check: called between chunks, and may raise. on_bytes: gets the size of each chunk.
    """

    def __init__(
        self,
        address: str,
        *,
        token: AbortToken | None = None,
        log: Log = lambda text: None,
        check: Callable[[], None] = lambda: None,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ):
        self.name = redacted(address).rstrip("/")
        self._fs, path = open_store(address, kind=CheckpointError)
        self._path = str(path).rstrip("/")
        self._token = token or AbortToken()
        self._log, self.check, self._on_bytes = log, check, on_bytes

    # --- reading ----------------------------------------------------------------------------------------------------

    def folders(self) -> list[RemoteCheckpoint]:
        """All folders of checkpoints, complete or not, by step; one without a name if the address is a checkpoint."""
        sizes: dict[str, dict[str, int | None]] = {}
        for path, info in self._try(self._find, self.name).items():
            folder, _, file = path.rpartition("/")
            if _NAME.fullmatch(folder) or (not folder and file == INDEX):
                sizes.setdefault(folder, {})[file] = info.get("size")
            elif not folder:
                sizes.setdefault("", {})[file] = info.get("size")
        found = [RemoteCheckpoint(name=name, sizes=files) for name, files in sizes.items()]
        kept = [folder for folder in found if folder.name or folder.is_listed]
        return sorted(kept, key=lambda folder: (folder.step, folder.name))

    def names(self) -> set[str]:
        """The names of the files at the address itself."""
        return {path for path in self._try(self._find, self.name) if "/" not in path}

    def complete(self) -> list[tuple[RemoteCheckpoint, Index]]:
        """The complete checkpoints, by step. Reads all their indexes."""
        indexes = ((folder, self.index_of(folder)) for folder in self.folders())
        return [(folder, index) for folder, index in indexes if index is not None]

    def index_of(self, folder: RemoteCheckpoint) -> Index | None:
        """The index of a complete checkpoint; None if it is not complete."""
        if not folder.is_listed:
            return None
        data = self.index_bytes(folder)
        try:
            index = decode_index(data, self._at_name(folder, INDEX))
        except CheckpointError:
            return None
        is_whole = all(folder.sizes.get(file.name, -1) in (file.size, None) for file in index.files)
        return index if is_whole else None

    def index_bytes(self, folder: RemoteCheckpoint) -> bytes:
        path = self._at(folder.name, INDEX)
        return bytes(self._try(partial(self._fs.cat_file, path), self._at_name(folder, INDEX)))

    def fetch(self, folder: RemoteCheckpoint, checkpoint_dir: CheckpointDirectory) -> Path:
        """Copies a complete checkpoint into a checkpoint directory, where it appears whole or not at all; every byte
        is verified. Raises RemoteDamage, which names the damaged file, CheckpointError and OSError."""
        data = self.index_bytes(folder)
        index = decode_index(data, self._at_name(folder, INDEX))
        disk, target = checkpoint_dir.disk, checkpoint_dir.path_of(index.step)
        is_here = (target / INDEX).is_file() and (target / INDEX).read_bytes() == data
        if is_here and all(_is_same(target / file.name, file, self.check) for file in index.files):
            return target
        unfinished = checkpoint_dir.directory / f"{target.name}.fetch.partial"
        disk.make_folder(unfinished)
        for file in index.files:
            if not _is_same(unfinished / file.name, file, self.check):
                act = partial(self._fetch_file, folder, file, unfinished, checkpoint_dir)
                self._try(act, self._at_name(folder, file.name))
        disk.write_file(unfinished / INDEX, data)
        listed = {INDEX, *(file.name for file in index.files)}
        for path in sorted(unfinished.iterdir()):
            if path.name not in listed:
                disk.remove_file(path)
        disk.sync_folder(unfinished)
        checkpoint_dir.publish(unfinished, index.step)
        return target

    def _fetch_file(
        self, folder: RemoteCheckpoint, file: IndexedFile, target: Path, checkpoint_dir: CheckpointDirectory
    ) -> None:
        disk, checksum, num_bytes = checkpoint_dir.disk, Checksum(), 0
        with self._fs.open(self._at(folder.name, file.name), "rb") as source, disk.create(target / file.name) as copy:
            while chunk := source.read(CHUNK_BYTES):
                self._tick(len(chunk))
                disk.write(copy, chunk)
                checksum.update(chunk)
                num_bytes += len(chunk)
            disk.sync(copy)
        if num_bytes != file.size:
            raise TransferError(f"{num_bytes:,} of {file.size:,} bytes arrived")
        if checksum.text() != file.crc32:
            name = self._at_name(folder, file.name)
            raise RemoteDamage(f"{name} is damaged: its checksum is not that of what was saved")

    # --- changes ----------------------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Writes a small file, reads it and removes it. Raises CheckpointError if any of that fails."""
        path, data = self._at(f"{PROBE}-{uuid4().hex[:8]}"), b"parallel3d"
        try:
            self._make_folder("")
            self._fs.pipe_file(path, data)
            found = self._fs.cat_file(path)
            self._fs.rm_file(path)
        except Exception as error:  # each driver has its own
            raise CheckpointError(f"{self.name} can't be written: {problem_of(error)}") from None
        if found != data:
            raise CheckpointError(f"{self.name} can't be written: a small file came back changed")

    def upload(self, source: Path, index_bytes: bytes, name: str, sizes: Mapping[str, int | None]) -> None:
        """Sends the files of the folder `source` that `sizes` lacks, then the index.

        Raises CheckpointError; for a file that is damaged here, before there is an index there.
        """
        index = decode_index(index_bytes, str(source / INDEX))
        folder = RemoteCheckpoint(name=name, sizes=sizes)
        self._try(partial(self._make_folder, name), self._at_name(folder))
        for file in index.files:
            if sizes.get(file.name, -1) == file.size:
                if not _is_same(source / file.name, file, self.check):
                    raise CheckpointError(f"{source / file.name} is damaged: it can't be uploaded")
            else:
                self._try(partial(self._send_file, source, folder, file), self._at_name(folder, file.name))
        found = self._try(self._find, self.name)
        for file in index.files:
            if (size := found.get(f"{name}/{file.name}", {}).get("size", -1)) not in (file.size, None):
                where = self._at_name(folder, file.name)
                raise CheckpointError(f"{where}: {max(size, 0):,} of {file.size:,} bytes are there")
        write = partial(self._fs.pipe_file, self._at(name, INDEX), index_bytes)
        self._try(write, self._at_name(folder, INDEX))

    def _send_file(self, source: Path, folder: RemoteCheckpoint, file: IndexedFile) -> None:
        path, checksum = self._at(folder.name, file.name), Checksum()
        try:
            content = (source / file.name).open("rb")
        except OSError as error:
            raise CheckpointError(f"{source / file.name} can't be read ({error.strerror})") from None
        with content, self._fs.open(path, "wb") as target:
            while chunk := content.read(CHUNK_BYTES):
                target.write(chunk)
                self._tick(len(chunk))
                checksum.update(chunk)
        if checksum.text() != file.crc32:
            self._fs.rm_file(path)
            raise CheckpointError(f"{source / file.name} is damaged: its checksum is not that of what was written")

    def set_aside(self, folder: RemoteCheckpoint) -> None:
        """Keeps a checkpoint's files, but not among the complete ones."""
        what = self._at_name(folder)
        data = self.index_bytes(folder)
        self._try(partial(self._fs.pipe_file, self._at(folder.name, PREVIOUS), data), what)
        self._try(partial(self._remove_file, self._at(folder.name, INDEX)), what)

    def remove(self, folder: RemoteCheckpoint) -> None:
        """Removes a checkpoint, its index first."""
        what = self._at_name(folder)
        for file in sorted(folder.sizes, key=lambda name: name != INDEX):
            self._try(partial(self._remove_file, self._at(folder.name, file)), what)
        self._try(partial(self._remove_folder, self._at(folder.name)), what)

    # --- one operation ----------------------------------------------------------------------------------------------

    def _try(self, act: Callable[[], Any], what: str) -> Any:
        return attempt(act, what, self._token, self._log, kind=CheckpointError)

    def _find(self) -> dict[str, Mapping[str, Any]]:
        """All files below the address, by their paths relative to it."""
        self._fs.invalidate_cache()
        found = self._fs.find(self._path, detail=True)
        return {path[len(self._path) :].strip("/"): info for path, info in found.items() if path != self._path}

    def _make_folder(self, name: str) -> None:
        """Object stores have no folders."""
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple | list) else (self._fs.protocol,)
        if not set(protocols) & PACKAGES.keys():
            self._fs.makedirs(self._at(name) if name else self._path, exist_ok=True)

    def _remove_file(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            return

    def _remove_folder(self, path: str) -> None:
        """Removes an empty folder; object stores have none."""
        self._fs.invalidate_cache()
        if self._fs.isdir(path):
            self._fs.rm(path, recursive=True)

    def _at(self, *names: str) -> str:
        return "/".join([self._path, *filter(None, names)])

    def _at_name(self, folder: RemoteCheckpoint, file: str = "") -> str:
        """For messages."""
        return "/".join(filter(None, [self.name, folder.name, file]))

    def _tick(self, num_bytes: int) -> None:
        self._token.check()
        self.check()
        self._on_bytes(num_bytes)


def _is_same(path: Path, file: IndexedFile, check: Callable[[], None] = lambda: None) -> bool:
    """Whether the file is there, as the index has it."""
    try:
        with path.open("rb") as content:
            return path.stat().st_size == file.size and checksum_of(content, check) == file.crc32
    except OSError:
        return False
