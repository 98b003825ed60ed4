"""Decides when a run saves, and brings the ranks to agree that a checkpoint is complete.

    step k, when due    every rank copies what it writes (snapshot.py); training continues
    in the background   a thread of each rank writes its part and syncs it
    steps k+1 ...       each rank reports, in the iteration's one all-reduce, that its part is on disk or has failed
    all parts written   the leader's thread writes the index and publishes the checkpoint

A save that is unfinished when its membership generation ends is abandoned: if training resumes at the same step it
starts over, otherwise the next one follows. The iteration alone decides what is due, so all ranks start and end a save
together.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.index import RunFacts
from parallel3d.checkpoint.snapshot import Snapshot, take_snapshot
from parallel3d.checkpoint.write import SaveCancelled, publish, write_rank_files
from parallel3d.checkpoint.write_throttle import WriteThrottle
from parallel3d.config.derived import save_intervals
from parallel3d.errors import CheckpointError
from parallel3d.monitor.saved_notice import SavedNotice
from parallel3d.parallel.abort import POLL_S
from parallel3d.parallel.background import BackgroundExecutor
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.entry import NO_SAVE_STATUS, Entry, SaveStatus
from parallel3d.trainer.resume import state_to_json

CHECKPOINTS = "checkpoints"


class CheckpointSaver(ABC):
    """The saves of one rank; returned texts are notices for the user."""

    last_step = 0
    """Step of the newest save that was started."""
    has_failed = False
    """Whether the last `save_now` failed; the same on all ranks of the grid."""

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, which a change of membership would end."""
        return False

    @abstractmethod
    def is_due(self, iteration: int, *, is_last: bool, is_stopped: bool = False) -> bool:
        """Whether to save now; `is_last`: no step follows, `is_stopped`: because the run was asked to stop."""

    @abstractmethod
    def begin_generation(self) -> list[str]:
        """Abandons what an earlier generation left unfinished."""

    @abstractmethod
    def begin(self, training_loss: float | None) -> list[str]:
        """Takes the snapshot; a background thread does the rest."""

    @abstractmethod
    def save_now(self, training_loss: float | None) -> list[str]:
        """Saves, and returns when the checkpoint is complete or has failed. All ranks of the grid call it."""

    @abstractmethod
    def finish(self) -> list[str]:
        """Waits until the current save is published or abandoned, on all ranks of the grid together."""

    @abstractmethod
    def status(self) -> SaveStatus:
        """This rank's part of the next entry."""

    @abstractmethod
    def on_entry(self, entry: Entry) -> list[str]:
        """Handles what an entry reports about the current save."""


class NoSaver(CheckpointSaver):
    """Saves nothing."""

    def is_due(self, iteration: int, *, is_last: bool, is_stopped: bool = False) -> bool:
        return False

    def begin_generation(self) -> list[str]:
        return []

    def begin(self, training_loss: float | None) -> list[str]:
        return []

    def save_now(self, training_loss: float | None) -> list[str]:
        return []

    def finish(self) -> list[str]:
        return []

    def status(self) -> SaveStatus:
        return NO_SAVE_STATUS

    def on_entry(self, entry: Entry) -> list[str]:
        return []


@dataclass(kw_only=True)
class _PendingSave:
    """The current save of this rank."""

    step: int
    partial: Path
    ranks: tuple[int, ...]
    facts: RunFacts
    written: Future[None]
    write_throttle: WriteThrottle
    cancelled: threading.Event = field(default_factory=threading.Event)


class AsyncSaver(CheckpointSaver):
    """Saves into a checkpoint directory while training continues, as the section `checkpoint` asks.

    `text` identifies the corpus; `files` are added to each checkpoint (the tokenizer).
    """

    def __init__(
        self,
        rank: RankContext,
        checkpoint_dir: CheckpointDirectory,
        text: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ):
        self.last_step = rank.resumed_from
        self._rank = rank
        self._checkpoint_dir = checkpoint_dir
        self._old_leftovers = checkpoint_dir.leftovers()
        """Those of earlier runs, whose generations say nothing here."""
        self._text = dict(text)
        self._files = dict(files or {})
        self._settings = rank.config.checkpoint
        self._executor = BackgroundExecutor("save")
        self._save: _PendingSave | None = None
        self._publishing: deque[tuple[int, Future[str]]] = deque()
        """Checkpoints that this rank is publishing, oldest first."""
        self._was_cancelled = False
        """Whether a rank failed to write its part of the newest save; the same on all ranks."""
        self._last_due_step: int | None = None
        """Iteration of this generation at which a save was last due, and started or skipped."""

    @property
    def is_saving(self) -> bool:
        return self._save is not None

    def is_due(self, iteration: int, *, is_last: bool, is_stopped: bool = False) -> bool:
        if iteration in (self._last_due_step, self._rank.resumed_from):
            return False
        intervals = save_intervals(self._settings)
        if is_last:
            return self._settings.save_at_end or (is_stopped and bool(intervals))
        return any(iteration % steps == 0 for steps in intervals)

    def begin_generation(self) -> list[str]:
        self._last_due_step = None
        if (save := self._save) is None:
            return []
        self._cancel_save()
        return self._if_leader(f"the checkpoint of step {save.step} is abandoned: the workers have changed meanwhile")

    def begin(self, training_loss: float | None) -> list[str]:
        step = self._last_due_step = self._rank.state.iteration
        if self._save is not None:
            text = f"no checkpoint of step {step}: that of step {self._save.step} is still being written"
            return [*self._collect_published(), *self._if_leader(text)]
        self._start(step, training_loss)
        return self._collect_published()

    def save_now(self, training_loss: float | None) -> list[str]:
        texts = self._finish()  # a save of an earlier step
        step = self._last_due_step = self._rank.state.iteration
        self._start(step, training_loss)
        return [*texts, *self.finish()]

    def finish(self) -> list[str]:
        texts = self._finish()
        for _, future in self._publishing:
            self._wait(future)
        bad = [step for step, future in self._publishing if future.exception() is not None]
        has_failed = torch.tensor([float(self._was_cancelled or self.last_step in bad)])
        self._rank.groups.world.all_reduce(has_failed)  # the leader has published: a later failure does no harm
        self.has_failed = bool(has_failed.item())
        return [*texts, *self._collect_published()]

    def status(self) -> SaveStatus:
        if self._save is None or not self._save.written.done():
            return NO_SAVE_STATUS
        failed = self._save.written.exception() is not None
        return SaveStatus(is_on_disk=not failed, has_failed=failed)

    def on_entry(self, entry: Entry) -> list[str]:
        return [*self._apply_save_counts(entry.num_saved, entry.num_not_saved), *self._collect_published()]

    # --- one save ---------------------------------------------------------------------------------------------------

    def _start(self, step: int, training_loss: float | None) -> None:
        rank = self._rank
        partial = self._checkpoint_dir.partial_path(step, rank.current.number)
        snapshot = take_snapshot(rank.optimizer, tp=rank.tp_shard)
        write_throttle, cancelled = WriteThrottle(self._settings.write_share), threading.Event()
        self._save = _PendingSave(
            step=step,
            partial=partial,
            ranks=rank.grid.ranks,
            facts=self._facts(training_loss),
            written=self._executor.submit(
                _WriteJob(
                    checkpoint_dir=self._checkpoint_dir,
                    partial=partial,
                    rank=rank.rank,
                    old_leftovers=self._old_leftovers if rank.is_leader else None,
                    snapshot=snapshot,
                    write_throttle=write_throttle,
                    cancelled=cancelled,
                )
            ),
            write_throttle=write_throttle,
            cancelled=cancelled,
        )
        self.last_step, self._was_cancelled = step, False

    def _facts(self, training_loss: float | None) -> RunFacts:
        state = self._rank.state
        return RunFacts(
            state=state_to_json(state),
            evaluation_loss=state.evaluations[-1].loss if state.is_evaluated else None,
            training_loss=training_loss,
            config=self._rank.config.model_dump(),
            text=self._text,
            versions={name: metadata.version(name) for name in ("parallel3d", "torch", "safetensors")},
            cpu_gemm=self._rank.gemm.to_json(),
        )

    def _apply_save_counts(self, num_saved: int, num_not_saved: int) -> list[str]:
        """Completes or abandons the current save by the counts of all ranks, on all of them alike."""
        save = self._save
        if save is None:
            return []
        if num_not_saved:
            error = save.written.exception() if save.written.done() else None
            self._cancel_save()
            self._was_cancelled = True
            if error is None:
                return []
            name = f"rank {self._rank.rank}"
            return [
                f"the checkpoint of step {save.step} is abandoned: {name} can't write its part ({_describe(error)})"
            ]
        if num_saved == len(save.ranks):
            self._save = None
            if self._rank.is_leader:
                self._publishing.append((save.step, self._executor.submit(lambda: self._publish(save))))
        return []

    def _publish(self, save: _PendingSave) -> str:
        """Publishes a save, prunes old checkpoints, and returns the notice about both."""
        checkpoint_dir, settings = self._checkpoint_dir, self._settings
        index = publish(checkpoint_dir, save.partial, save.step, save.ranks, save.facts, self._files)
        path, megabytes = checkpoint_dir.path_of(save.step), index.num_bytes / 1e6
        text = str(SavedNotice(step=save.step, path=str(path), megabytes=megabytes))
        try:
            checkpoint_dir.prune(
                keep_last=settings.keep_last,
                keep_every=settings.keep_every,
                weights_only=settings.keep_every_weights_only,
            )
        except (OSError, CheckpointError) as error:
            return f"{text}; could not remove older ones ({_describe(error)})"
        return text

    def _finish(self) -> list[str]:
        """Waits until all ranks have written the current save, if any, or abandoned it."""
        texts: list[str] = []
        while (save := self._save) is not None:
            save.write_throttle.stop_throttling()  # training waits
            self._wait(save.written)
            status = self.status()
            counts = torch.tensor([float(status.is_on_disk), float(status.has_failed)], dtype=torch.float64)
            self._rank.groups.world.all_reduce(counts)
            num_saved, num_not_saved = (int(count) for count in counts.tolist())
            texts += self._apply_save_counts(num_saved, num_not_saved)
        return texts

    def _wait(self, future: Future[Any]) -> None:
        token = self._rank.token
        with token.waiting():
            while not future.done():
                token.sleep(POLL_S)

    def _cancel_save(self) -> None:
        if self._save is not None:
            self._save.cancelled.set()
            self._save.write_throttle.stop_throttling()
            self._save = None

    def _collect_published(self) -> list[str]:
        """Notices about the checkpoints that this rank has finished publishing."""
        texts = []
        while self._publishing and self._publishing[0][1].done():
            step, future = self._publishing.popleft()
            error = future.exception()
            if error is not None:
                texts.append(f"the checkpoint of step {step} is abandoned: it can't be published ({_describe(error)})")
                continue
            texts.append(future.result())  # bounded: it is done
        return texts

    def _if_leader(self, text: str) -> list[str]:
        return [text] if self._rank.is_leader else []


@dataclass(kw_only=True)
class _WriteJob:
    """A rank's part of a save, for its background thread; refers to nothing that should be freed earlier."""

    checkpoint_dir: CheckpointDirectory
    partial: Path
    rank: int
    old_leftovers: Collection[str] | None
    """Leftovers of earlier runs, which the leader removes; None on other ranks."""
    snapshot: Snapshot
    write_throttle: WriteThrottle
    cancelled: threading.Event

    def __call__(self) -> None:
        self._check()
        if self.old_leftovers is not None:
            with suppress(OSError, CheckpointError):  # leftovers do no harm
                self.checkpoint_dir.remove_leftovers(keep=self.partial, old=self.old_leftovers)
        write_rank_files(self.checkpoint_dir.disk, self.partial, self.rank, self.snapshot, check=self._check)

    def _check(self) -> None:
        self.write_throttle.throttle()
        if self.cancelled.is_set():
            raise SaveCancelled


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror or error)
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
