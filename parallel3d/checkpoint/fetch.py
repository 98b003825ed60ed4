"""Fetches checkpoints from remote stores, for all that read checkpoints: to resume, to start from, to convert.

Every byte is verified on the way, and a checkpoint appears whole or not at all. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import CheckpointDirectory, NewestCheckpoint, verify_resumable
from parallel3d.checkpoint.disk import Disk
from parallel3d.checkpoint.index import Index
from parallel3d.checkpoint.remote_directory import RemoteCheckpoint, RemoteDamage, RemoteDirectory, remote_name, step_of
from parallel3d.checkpoint.store_process import Stalled, run_watched, say
from parallel3d.data.cache import build_once
from parallel3d.data.remote import fetch, local_path
from parallel3d.errors import CheckpointError
from parallel3d.parallel.abort import AbortToken
from parallel3d.remote_address import is_remote, redacted

CONFIG = "config.json"
HUGGING_FACE = (".json", ".safetensors", ".model", ".txt", ".jinja")
"""Ends of the names that are fetched of a Hugging Face folder: neither pickled weights nor other copies of them."""
FETCHED = "fetched"
"""Folder of fetched checkpoints below data.cache_directory, or in the run's checkpoint directory."""


OnStart = Callable[[str, int], None]
"""Called with the address of a checkpoint and its bytes before they travel."""


def _quiet(where: str, num_bytes: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """The outcome of a fetch; without a path there was nothing to fetch."""

    path: Path | None
    skipped: tuple[str, ...] = ()
    """The damage of newer ones."""


def fetch_newest(
    remote: RemoteDirectory,
    checkpoint_dir: CheckpointDirectory,
    *,
    newer_than: int = -1,
    resumable: bool = False,
    on_start: OnStart = _quiet,
) -> Fetched:
    """Copies the newest complete checkpoint after the step `newer_than` into a checkpoint directory; damaged ones are
    skipped. `resumable`: not one of weights only. Raises CheckpointError if the store can't be read, OSError."""
    skipped: list[str] = []
    for folder in reversed(remote.folders()):
        if not folder.is_listed or (folder.name and folder.step <= newer_than):
            continue
        where = f"{remote.name}/{folder.name}".rstrip("/")
        index = remote.index_of(folder)
        if index is None:
            skipped.append(f"{where} is not complete")
        elif resumable and not index.has_optimizer_state:
            skipped.append(f"{where} holds weights only: no run can resume from it")
        else:
            on_start(where, index.num_bytes)
            try:
                path = remote.fetch(folder, checkpoint_dir)
                return Fetched(path=path, skipped=tuple(skipped))
            except RemoteDamage as error:
                skipped.append(str(error))
    return Fetched(path=None, skipped=tuple(skipped))


def local_checkpoint(source: str | Path, cache_directory: str | Path) -> Path:
    """Where a checkpoint can be read: a local path as it is, an address once it has been fetched into the cache.

    An address is that of a checkpoint, of a target of uploads, whose newest is taken, or of a Hugging Face folder. A
    process of its own fetches.
    Raises CheckpointError.
    """
    if not is_remote(str(source)):
        return Path(source)
    cache = Path(cache_directory).expanduser()
    if (known := _known_copy(str(source), cache)) is not None:
        return known
    if ((copy := Path(local_path(str(source), cache))) / CONFIG).is_file():  # of a Hugging Face folder
        return copy
    fetched = _run_fetch(str(source), ["--cache", str(cache)])
    return _found(fetched.path, fetched.skipped, str(source))


def fetch_into_cache(remote: RemoteDirectory, source: str, cache: Path, on_start: OnStart = _quiet) -> Fetched:
    """The copy of the newest complete checkpoint in the cache, or of a Hugging Face folder, where one process of a host
    makes it.

    Raises CheckpointError, and DataError if the cache can't be written.
    """
    place, skipped = place_for(source, cache), list[str]()
    for folder in reversed([each for each in remote.folders() if each.is_listed]):
        where = f"{remote.name}/{folder.name}".rstrip("/")
        if (index := remote.index_of(folder)) is None:
            skipped.append(f"{where} is not complete")
            continue
        name = remote_name(index.step, remote.index_bytes(folder))
        try:
            build_once(place / name, partial(_fill, remote, folder, on_start, index), AbortToken(), say)
        except RemoteDamage as error:
            skipped.append(str(error))
            continue
        return Fetched(path=CheckpointDirectory(place / name).path_of(index.step), skipped=tuple(skipped))
    if not skipped and CONFIG in remote.names():
        fetch([source], cache, _CheckedToken(remote.check), say, suffixes=HUGGING_FACE)
        return Fetched(path=Path(local_path(source, cache)), skipped=())
    return Fetched(path=None, skipped=tuple(skipped))


class _CheckedToken(AbortToken):
    """Shows that a fetch goes on."""

    def __init__(self, check: Callable[[], None]):
        super().__init__()
        self._on_check = check

    def check(self) -> None:
        super().check()
        self._on_check()


def _known_copy(source: str, cache: Path) -> Path | None:
    """The copy of an address that names one checkpoint, if there is one: the store is not asked then."""
    name = source.rstrip("/").rpartition("/")[2]
    step = step_of(name)
    folder = CheckpointDirectory(place_for(source, cache) / name).path_of(step)
    return folder if step >= 0 and folder.is_dir() else None


def _fill(remote: RemoteDirectory, folder: RemoteCheckpoint, on_start: OnStart, index: Index, place: Path) -> None:
    on_start(f"{remote.name}/{folder.name}".rstrip("/"), index.num_bytes)
    remote.fetch(folder, CheckpointDirectory(place))


def place_for(source: str, folder: Path) -> Path:
    """The checkpoint directory for what is fetched from an address."""
    return folder / FETCHED / hashlib.sha256(source.rstrip("/").encode()).hexdigest()[:16]


def _found(path: Path | None, skipped: Sequence[str], source: str) -> Path:
    """The path; raises CheckpointError with the reasons if there is none."""
    if path is None:
        raise CheckpointError(f"no complete checkpoint at {redacted(source)}: {'; '.join(skipped) or 'there is none'}")
    for text in skipped:
        say(f"checkpoint skipped: {text}")
    return path


class FetchingDirectory(CheckpointDirectory):
    """A run's checkpoint directory that gets a newer checkpoint from `target`, to which the run's are copied.

    Fetching is done by a process of its own, so that this one loads no driver.
    """

    def __init__(self, directory: Path, target: str | None, disk: Disk | None = None):
        super().__init__(directory, disk)
        self._target = target

    def find_newest_valid(self) -> NewestCheckpoint:
        found = super().find_newest_valid()
        if self._target is None:
            return found
        newest = found.index.step if found.index else -1
        try:
            fetched = _run_fetch(self._target, _into(self.directory, newest))
        except CheckpointError as error:
            if found.index is None:
                raise CheckpointError(f"{error}. Without it this run would begin again from step 0") from None
            return replace(found, damaged=(*found.damaged, f"none was looked for at the target: {error}"))
        damaged = (*fetched.skipped, *found.damaged)
        if fetched.path is None:
            return replace(found, damaged=damaged)
        return NewestCheckpoint(path=fetched.path, index=verify_resumable(fetched.path), damaged=damaged)

    def find_named(self, source: str) -> Path:
        """The path that `run.resume` names; of an address the checkpoint that is fetched into this directory if it is
        the run's own, else beside its checkpoints."""
        if not is_remote(source):
            return super().find_named(source)
        is_own = self._target is not None and f"{source}/".startswith(self._target.rstrip("/") + "/")
        folder = self.directory if is_own else place_for(source, self.directory)
        fetched = _run_fetch(source, _into(folder))
        return _found(fetched.path, fetched.skipped, source).resolve()


def _run_fetch(source: str, arguments: Sequence[str]) -> Fetched:
    """Runs `parallel3d fetch`. Raises CheckpointError."""
    events: dict[str, Any] = {}

    def on_event(event: dict[str, Any]) -> None:
        events[event["event"]] = event
        if event["event"] in ("retry", "fetching"):
            say(event["text"])

    try:
        code = run_watched("fetch", [source, *arguments], on_event)
    except Stalled as error:
        raise CheckpointError(f"{redacted(source)}: {error}") from None
    if code or "fetched" not in events:
        text = events.get("failed", {}).get("text", f"the process that fetches ended with code {code}")
        raise CheckpointError(text)
    path = events["fetched"]["path"]
    return Fetched(path=Path(path) if path else None, skipped=tuple(events["fetched"]["skipped"]))


def _into(folder: Path, newer_than: int = -1) -> list[str]:
    return [str(folder), "--resumable", "--newer-than", str(newer_than)]
