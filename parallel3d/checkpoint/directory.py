"""The checkpoints of a run: which exist, which is the newest good one, which are kept.

    <directory>/step-00000200/           published: complete since it got its name, in one rename
    <directory>/step-00000300.e0.partial being written, in membership generation 0; or left over
    <directory>/step-00000100.0.removed  being removed
    <directory>/latest -> step-00000200  the newest; best: the one with the lowest loss
    <directory>/previous-1/              checkpoints from which the run does not continue, moved there at its start

No torch here: a launcher chooses the checkpoint before it starts workers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from parallel3d.checkpoint.checksum import checksum_of
from parallel3d.checkpoint.disk import Disk
from parallel3d.checkpoint.drop_optimizer_state import drop_optimizer_state
from parallel3d.checkpoint.index import INDEX, Index, IndexedFile, decode_index
from parallel3d.errors import CheckpointError

LATEST, BEST = "latest", "best"
MAX_READERS = 8

_NAME = re.compile(r"step-(\d{8,})")
_PREVIOUS = re.compile(r"previous-\d+")
_LEFTOVER = re.compile(r"step-\d{8,}\.(e(\d+)\.partial|\w+\.removed)")


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The newest checkpoint from which a run can resume, if any, and the damage of newer ones."""

    path: Path | None
    index: Index | None
    damaged: tuple[str, ...]


class CheckpointDirectory:
    """The checkpoints in one folder, which need not exist yet."""

    def __init__(self, directory: Path, disk: Disk | None = None):
        self.directory = directory
        self.disk = disk or Disk()

    def path_of(self, step: int) -> Path:
        return self.directory / f"step-{step:08}"

    def partial_path(self, step: int, generation: int) -> Path:
        """The folder in which a checkpoint is written: one for each attempt, so that it contains no older files."""
        return self.directory / f"step-{step:08}.e{generation}.partial"

    def steps(self) -> list[int]:
        """The steps of the published checkpoints, ascending."""
        names = (_NAME.fullmatch(name) for name in _listdir(self.directory))
        return sorted(int(name[1]) for name in names if name)

    def find_newest_valid(self) -> NewestCheckpoint:
        """Verifies every byte of the newest checkpoint; if it is damaged, of the one before it, and so on."""
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                index = verify_resumable(self.path_of(step))
                return NewestCheckpoint(path=self.path_of(step), index=index, damaged=tuple(damaged))
            except CheckpointError as error:
                damaged.append(str(error))
        return NewestCheckpoint(path=None, index=None, damaged=tuple(damaged))

    def owner(self) -> Path | None:
        """The folder of the run whose checkpoints these are, as its configuration has it; None if there are none, or
        the newest does not say."""
        for step in reversed(self.steps()):
            try:
                run = read_index(self.path_of(step)).facts.config.get("run", {})
            except CheckpointError:
                continue
            return Path(run["directory"]) if run.get("directory") else None
        return None

    def find_named(self, source: str) -> Path:
        """The checkpoint that `run.resume` names; links are followed."""
        return Path(source).resolve()

    # --- changes ----------------------------------------------------------------------------------------------------

    def leftovers(self) -> frozenset[str]:
        """The names of what interrupted saves and removals have left, or what some are writing and removing now."""
        return frozenset(filter(_LEFTOVER.fullmatch, _listdir(self.directory)))

    def remove_leftovers(self, keep: Path, *, old: Collection[str] = ()) -> None:
        """Removes leftovers of interrupted saves and removals: those named in `old`, and those of no later generation
        than `keep`, the save that is being written. Later ones are saves of a run that goes on without this process,
        which does not know it yet. A rename claims each one first: another process may be removing it too."""
        own = generation_of(keep.name)
        for name in self.leftovers() - {keep.name}:
            if name in old or generation_of(name) <= own:
                self._remove(self.directory / name)

    def publish(self, partial: Path, step: int) -> None:
        """Gives a complete checkpoint its name; replaces one of the same step."""
        target = self.path_of(step)
        replaced = self._claim(target) if target.exists() else None
        self.disk.rename(partial, target)
        self.disk.sync_folder(self.directory)
        if replaced is not None:
            self.disk.remove_tree(replaced)

    def set_link(self, name: str, step: int) -> None:
        """Points the link `name` at the checkpoint of `step`, atomically."""
        temporary = self.directory / f".{name}"
        self.disk.remove_file(temporary)
        self.disk.link(self.path_of(step).name, temporary)
        self.disk.rename(temporary, self.directory / name)
        self.disk.sync_folder(self.directory)

    def prune(self, *, keep_last: int, keep_every: int | None, weights_only: bool = False) -> None:
        """Points `latest` and `best`, and removes checkpoints that are neither among the last, nor the best, nor
        permanent. With `weights_only` those that are only permanent lose their optimizer state.

        Raises OSError, and CheckpointError if a permanent one is damaged.
        """
        steps = self.steps()
        self.set_link(LATEST, steps[-1])
        best = best_of(self._losses(steps))
        if best is not None:
            self.set_link(BEST, best)
        superfluous, permanent = plan_pruning(steps, keep_last=keep_last, keep_every=keep_every, best=best)
        for step in superfluous:
            self._remove(self.path_of(step))
        for step in permanent if weights_only else ():
            drop_optimizer_state(self.path_of(step), read_index(self.path_of(step)), self.disk)

    def archive_later(self, after: int) -> Path | None:
        """Moves checkpoints of later steps, from which the run does not continue, into the next free previous-N."""
        later = [self.path_of(step) for step in self.steps() if step > after]
        if not later:
            return None
        target = next(p for number in count(1) if not (p := self.directory / f"previous-{number}").exists())
        self.disk.make_folder(target)
        for path in later:
            self.disk.rename(path, target / path.name)
        left = self.steps()
        for name in (LATEST, BEST):
            link = self.directory / name
            if link.is_symlink() and not link.exists():
                self.disk.remove_file(link)
                if left and name == LATEST:
                    self.set_link(name, left[-1])
        return target

    def newest_archived(self) -> Path | None:
        """The last checkpoint of the archive that was made last; None without any."""
        names = filter(_PREVIOUS.fullmatch, _listdir(self.directory))
        for number in sorted((int(name.removeprefix("previous-")) for name in names), reverse=True):
            archive = CheckpointDirectory(self.directory / f"previous-{number}")
            if steps := archive.steps():
                return archive.path_of(steps[-1])
        return None

    def archived_bytes(self) -> int:
        """The size of all archived checkpoints."""
        folders = [self.directory / name for name in _listdir(self.directory) if _PREVIOUS.fullmatch(name)]
        return sum(file.lstat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())

    def _remove(self, path: Path) -> None:
        try:
            self.disk.remove_tree(self._claim(path))
        except FileNotFoundError:  # another process has claimed it
            return

    def _claim(self, path: Path) -> Path:
        """Renames a checkpoint, which then no longer counts as one; returns its new path."""
        stem = path.name.split(".")[0]
        names = (self.directory / f"{stem}.{number}.removed" for number in count())
        target = next(name for name in names if not name.exists())
        self.disk.rename(path, target)
        return target

    def _losses(self, steps: Sequence[int]) -> Iterator[tuple[int, float | None, float | None]]:
        for step in steps:
            try:
                facts = read_index(self.path_of(step)).facts
            except CheckpointError:
                continue
            yield step, facts.evaluation_loss, facts.training_loss


def generation_of(leftover: str) -> int:
    """The generation in which a leftover was written; -1 for what is being removed."""
    match = _LEFTOVER.fullmatch(leftover)
    return int(match[2]) if match and match[2] else -1


def best_of(losses: Iterator[tuple[int, float | None, float | None]]) -> int | None:
    """The step with the lowest evaluation loss; if none has one, with the lowest training loss."""
    table = list(losses)
    evaluated = [(loss, step) for step, loss, _ in table if loss is not None and loss == loss]
    trained = [(loss, step) for step, _, loss in table if loss is not None and loss == loss]
    return min(evaluated or trained, default=(0.0, None))[1]


def plan_pruning(
    steps: Sequence[int], *, keep_last: int, keep_every: int | None, best: int | None
) -> tuple[list[int], list[int]]:
    """Returns (steps to remove, permanent steps): those of the ascending `steps` that are neither among the last nor
    the best."""
    old = [step for step in steps[:-keep_last] if step != best]
    permanent = [step for step in old if keep_every and step % keep_every == 0]
    return [step for step in old if step not in permanent], permanent


def read_index(folder: Path) -> Index:
    """Reads the index of a published checkpoint; raises CheckpointError if it is unreadable or damaged."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror})") from None
    return decode_index(data, str(path))


def verify_checkpoint(folder: Path, check: Callable[[], None] = lambda: None) -> Index:
    """Verifies every byte of a checkpoint and returns its index; raises CheckpointError, which names the damaged file.

    `check` is called from time to time, on several threads, and may raise to end the reading.
    """
    index = read_index(folder)
    with ThreadPoolExecutor(max_workers=MAX_READERS) as pool:
        for problem in pool.map(lambda file: _find_damage(folder, file, check), index.files):
            if problem:
                raise CheckpointError(problem)
    return index


def verify_resumable(folder: Path, check: Callable[[], None] = lambda: None) -> Index:
    """As `verify_checkpoint`; also raises CheckpointError if a run can't resume from the checkpoint."""
    if not read_index(folder).has_optimizer_state:
        raise CheckpointError(
            f"{folder} holds weights only: no run can resume from it, but one can start from it (run.initialize_from)"
        )
    return verify_checkpoint(folder, check)


def _find_damage(folder: Path, file: IndexedFile, check: Callable[[], None]) -> str:
    """Describes the damage of a file; "" if there is none."""
    path = folder / file.name
    try:
        with path.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            if size != file.size:
                return f"{path} is damaged: {size:,} bytes, {file.size:,} were written"
            if checksum_of(content, check) != file.crc32:
                return f"{path} is damaged: its checksum is not that of what was written"
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    return ""


def _listdir(path: Path) -> Collection[str]:
    """The names in a folder, () if it does not exist; raises CheckpointError if it can't be listed."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return ()
    except OSError as error:  # a file, a folder of another user, a stale handle
        raise CheckpointError(
            f"{path} cannot be listed ({error.strerror}): it must be a folder of checkpoints; repair it, or set"
            " checkpoint.directory to another one"
        ) from None
