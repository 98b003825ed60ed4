"""Copies a run's checkpoints to a remote store: which, in what order, and which are removed there. No torch.

One pass sends all that is missing, the newest first, and ends. What it sends is held by hard links meanwhile, so that
the run may remove the checkpoint; a pass that was killed is repeated, or finished, by the next one.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from parallel3d.checkpoint.directory import CheckpointDirectory, best_of, plan_pruning, read_index
from parallel3d.checkpoint.hold import hold_checkpoint, release_checkpoints
from parallel3d.checkpoint.index import INDEX, decode_index
from parallel3d.checkpoint.remote_directory import PREVIOUS, RemoteCheckpoint, RemoteDirectory, remote_name
from parallel3d.errors import CheckpointError

HELD, LOCK = ".uploading", ".upload.lock"
Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The checkpoints that stay at the target: the last, the best, and the multiples of `every`."""

    last: int | None = None
    """None: all."""
    every: int | None = None

    def superfluous(self, steps: Collection[int], best: int | None) -> set[int]:
        if self.last is None:
            return set()
        return set(plan_pruning(sorted(steps), keep_last=self.last, keep_every=self.every, best=best)[0])


class UploadPass:
    """Brings the target up to date with a checkpoint directory.

    report: gets events: set_aside, uploading, uploaded, removed.
    """

    def __init__(self, checkpoint_dir: CheckpointDirectory, remote: RemoteDirectory, keep: Keep, report: Report):
        self._dir, self._remote, self._keep, self._report = checkpoint_dir, remote, keep, report

    def run(self, *, continued_from: int | None = None) -> None:
        """Sends what is missing. `continued_from`: the step from which the run goes on; later checkpoints that are at
        the target, and not here, are of a line that it has left. Raises CheckpointError and OSError."""
        release_checkpoints(self._dir.directory, HELD)
        folders = self._remote.folders()
        if continued_from is not None:
            ours = {name for name, _ in self._local().values()}
            for folder in folders:
                if folder.is_listed and folder.step > continued_from and folder.name not in ours:
                    self._set_aside(folder)
        vanished, sent = set[str](), set[str]()
        while pending := self._pending(vanished):
            name = self._local().get(pending[0], ("", b""))[0]
            if name in sent:
                raise CheckpointError(f"{self._remote.name}/{name}/{INDEX} was written, and is not there in its size")
            if not self._upload(pending[0]):
                vanished.add(name)
                continue
            sent.add(name)
            self._prune()
        self._prune()  # an earlier pass may have ended before it
        self._remove_unfinished()

    # --- what to do -------------------------------------------------------------------------------------------------

    def _pending(self, vanished: Collection[str]) -> list[int]:
        """The steps that are to be sent, the newest first."""
        local = {step: index for step, index in self._local().items() if index[0] not in vanished}
        sizes = {name: len(data) for name, data in local.values()}
        folders = [folder for folder in self._remote.folders() if folder.is_listed]
        listed = {folder.step for folder in folders if folder.sizes[INDEX] in (sizes.get(folder.name), None)}
        listed |= {folder.step for folder in folders if folder.name not in sizes}
        missing = local.keys() - listed
        superfluous = self._superfluous(listed | local.keys()) if missing else set()
        return sorted(missing - superfluous, reverse=True)

    def _superfluous(self, steps: Collection[int]) -> set[int]:
        if not self._keep.superfluous(steps, None):
            return set()
        return self._keep.superfluous(steps, best_of(self._losses()))

    def _losses(self) -> Iterator[tuple[int, float | None, float | None]]:
        local = self._dir.steps()
        for step in local:
            try:
                facts = read_index(self._dir.path_of(step)).facts
            except CheckpointError:
                continue
            yield step, facts.evaluation_loss, facts.training_loss
        for folder in self._remote.folders():
            if folder.is_listed and folder.step not in local and (index := self._remote.index_of(folder)):
                yield folder.step, index.facts.evaluation_loss, index.facts.training_loss

    def _local(self) -> dict[int, tuple[str, bytes]]:
        """The name at the target, and the index, of each checkpoint that is here."""
        found = {}
        for step in self._dir.steps():
            try:
                data = (self._dir.path_of(step) / INDEX).read_bytes()
                found[step] = (remote_name(step, data), data)
            except (OSError, CheckpointError):  # removed meanwhile, or damaged
                continue
        return found

    # --- changes ----------------------------------------------------------------------------------------------------

    def _upload(self, step: int) -> bool:
        """Sends a checkpoint; False if it was removed here before it could be held."""
        with hold_checkpoint(self._dir.path_of(step), HELD) as (folder, data):
            if folder is None:
                return False
            name = remote_name(step, data)
            index = decode_index(data, str(folder / INDEX))
            self._report({"event": "uploading", "step": step, "name": name, "bytes": index.num_bytes})
            there = {each.name: each for each in self._remote.folders()}
            try:
                self._remote.upload(folder, data, name, there[name].sizes if name in there else {})
            except CheckpointError:
                if self._local().get(step, ("", b""))[0] != name and folder == self._dir.path_of(step):
                    return False  # removed here meanwhile
                raise
        for other in there.values():
            if other.is_listed and other.step == step and other.name != name:
                self._set_aside(other)
        self._report({"event": "uploaded", "step": step, "name": name, "bytes": index.num_bytes})
        return True

    def _prune(self) -> None:
        folders = [folder for folder in self._remote.folders() if folder.is_listed]
        superfluous = self._superfluous({folder.step for folder in folders})
        for folder in folders:
            if folder.step in superfluous:
                self._remote.remove(folder)
                self._report({"event": "removed", "step": folder.step, "name": folder.name})

    def _remove_unfinished(self) -> None:
        """Removes what an interrupted upload or removal has left, of checkpoints that are no longer here."""
        ours = {name for name, _ in self._local().values()}
        for folder in self._remote.folders():
            if folder.name and not folder.sizes.keys() & {INDEX, PREVIOUS} and folder.name not in ours:
                self._remote.remove(folder)

    def _set_aside(self, folder: RemoteCheckpoint) -> None:
        self._remote.set_aside(folder)
        fields = {"step": folder.step, "name": folder.name, "bytes": folder.num_bytes}
        self._report({"event": "set_aside", **fields})


def take_lock(directory: Path) -> IO[bytes] | None:
    """Holds the uploads of a checkpoint directory; None if another process does."""
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
