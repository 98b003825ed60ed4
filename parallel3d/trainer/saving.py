"""When a run saves, and how its ranks agree that a checkpoint is there.

    step k, k due     every rank copies what it writes (snapshot.py); training goes on
    meanwhile         a thread of each rank writes its part, and syncs it
    steps k+1 ...     each rank says in the iteration's one all-reduce whether its part is on disk, or can't be
    all have said so  the leader writes the index and publishes, on its own such thread

A membership epoch that ends takes its unfinished save along: at the same step it is begun anew, later the next one
comes. What is due follows from the iteration alone, so that all ranks begin and end a save together.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from parallel3d.checkpoint.catalogue import Catalogue
from parallel3d.checkpoint.index import RunFacts
from parallel3d.checkpoint.snapshot import Snapshot, take_snapshot
from parallel3d.checkpoint.write import Backroom, Pace, SaveAbandoned, publish, write_part
from parallel3d.comm.abort import POLL_S
from parallel3d.config.derived import save_intervals
from parallel3d.errors import CheckpointError
from parallel3d.trainer.build import RankRuntime
from parallel3d.trainer.entry import NO_WORD, Entry, SaveWord
from parallel3d.trainer.resume import state_to_json

CHECKPOINTS = "checkpoints"


class Saving(ABC):
    """A rank's saves; texts that come back are for a person."""

    last_step = 0
    """The step of the newest save that was begun."""
    has_failed = False
    """Whether the last `save_now` has left no checkpoint; the same on all ranks of the grid."""

    @abstractmethod
    def is_due(self, iteration: int, *, ends: bool, early: bool = False) -> bool:
        """Whether a save comes now; `ends`: no step follows, `early`: because somebody stopped the run."""

    @abstractmethod
    def begin_epoch(self) -> list[str]:
        """What another epoch has left unfinished is given up."""

    @abstractmethod
    def begin(self, training_loss: float | None) -> list[str]:
        """Takes the snapshot of a save and leaves the rest to a thread."""

    @abstractmethod
    def save_now(self, training_loss: float | None) -> list[str]:
        """Saves, and returns when it is done: the run ends. All ranks of the grid call it."""

    @abstractmethod
    def finish(self) -> list[str]:
        """Returns when a save that is under way is published or given up: on all ranks of the grid together."""

    @abstractmethod
    def word(self) -> SaveWord:
        """This rank's part of the next entry."""

    @abstractmethod
    def note(self, entry: Entry) -> list[str]:
        """Takes from an entry what it says of the save under way."""


class NoSaving(Saving):
    """A run that leaves no checkpoints."""

    def is_due(self, iteration: int, *, ends: bool, early: bool = False) -> bool:
        return False

    def begin_epoch(self) -> list[str]:
        return []

    def begin(self, training_loss: float | None) -> list[str]:
        return []

    def save_now(self, training_loss: float | None) -> list[str]:
        return []

    def finish(self) -> list[str]:
        return []

    def word(self) -> SaveWord:
        return NO_WORD

    def note(self, entry: Entry) -> list[str]:
        return []


@dataclass(kw_only=True)
class _Save:
    """One save under way on this rank."""

    step: int
    partial: Path
    ranks: tuple[int, ...]
    facts: RunFacts
    written: Future[None]
    pace: Pace
    given_up: threading.Event = field(default_factory=threading.Event)


class AsyncSaving(Saving):
    """Saves of a run into `catalogue`, by the configuration's section `checkpoint`; `text` identifies the corpus, and
    `files` go with each checkpoint (the tokenizer)."""

    def __init__(
        self,
        rank: RankRuntime,
        catalogue: Catalogue,
        text: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ):
        self.last_step = rank.resumed_from
        self._rank = rank
        self._catalogue = catalogue
        self._text = dict(text)
        self._files = dict(files or {})
        self._settings = rank.config.checkpoint
        self._backroom = Backroom("save")
        self._save: _Save | None = None
        self._publishing: deque[tuple[int, Future[str]]] = deque()
        """What this rank publishes, oldest first."""
        self._has_given_up = False
        """Whether some rank could not write its part of the newest save; the same on all ranks."""
        self._considered: int | None = None
        """The iteration at which a save was due, and begun or skipped, in this epoch."""

    def is_due(self, iteration: int, *, ends: bool, early: bool = False) -> bool:
        if iteration in (self._considered, self._rank.resumed_from):
            return False
        intervals = save_intervals(self._settings)
        if ends:
            return self._settings.save_at_end or (early and bool(intervals))
        return any(iteration % steps == 0 for steps in intervals)

    def begin_epoch(self) -> list[str]:
        self._considered = None
        if (save := self._save) is None:
            return []
        self._give_up()
        return self._as_leader(f"the checkpoint of step {save.step} is given up: the workers have changed meanwhile")

    def begin(self, training_loss: float | None) -> list[str]:
        step = self._considered = self._rank.state.iteration
        if self._save is not None:
            text = f"no checkpoint of step {step}: that of step {self._save.step} is still being written"
            return [*self._news(), *self._as_leader(text)]
        self._start(step, training_loss)
        return self._news()

    def save_now(self, training_loss: float | None) -> list[str]:
        texts = self._finish()  # one of an earlier step
        step = self._considered = self._rank.state.iteration
        self._start(step, training_loss)
        return [*texts, *self.finish()]

    def finish(self) -> list[str]:
        texts = self._finish()
        for _, future in self._publishing:
            self._wait(future)
        bad = [step for step, future in self._publishing if future.exception() is not None]
        has_failed = torch.tensor([float(self._has_given_up or self.last_step in bad)])
        self._rank.groups.world.all_reduce(has_failed)  # the leader has published: whoever fails now harms nothing
        self.has_failed = bool(has_failed.item())
        return [*texts, *self._news()]

    def word(self) -> SaveWord:
        if self._save is None or not self._save.written.done():
            return NO_WORD
        failed = self._save.written.exception() is not None
        return SaveWord(is_on_disk=not failed, has_failed=failed)

    def note(self, entry: Entry) -> list[str]:
        return [*self._settle(entry.num_saved, entry.num_not_saved), *self._news()]

    # --- one save ---------------------------------------------------------------------------------------------------

    def _start(self, step: int, training_loss: float | None) -> None:
        rank = self._rank
        assert rank.parts is not None
        partial = self._catalogue.partial_path(step, rank.parts.epoch)
        snapshot = take_snapshot(rank.optimizer, tp_rank=rank.place.tp, tp_size=rank.first_grid.tp_size)
        pace, given_up = Pace(self._settings.write_share), threading.Event()
        self._save = _Save(
            step=step,
            partial=partial,
            ranks=rank.grid.ranks,
            facts=self._facts(training_loss),
            written=self._backroom.submit(
                _Write(self._catalogue, partial, rank.rank, rank.is_leader, snapshot, pace, given_up)
            ),
            pace=pace,
            given_up=given_up,
        )
        self.last_step, self._has_given_up = step, False

    def _facts(self, training_loss: float | None) -> RunFacts:
        state = self._rank.state
        return RunFacts(
            state=state_to_json(state),
            evaluation_loss=state.evaluations[-1].loss if state.is_evaluated else None,
            training_loss=training_loss,
            config=self._rank.config.model_dump(),
            text=self._text,
            versions={name: metadata.version(name) for name in ("parallel3d", "torch", "safetensors")},
        )

    def _settle(self, num_saved: int, num_not_saved: int) -> list[str]:
        """What all ranks have said of the save under way decides on it, on all ranks alike."""
        save = self._save
        if save is None:
            return []
        if num_not_saved:
            error = save.written.exception() if save.written.done() else None
            self._give_up()
            self._has_given_up = True
            if error is None:
                return []
            name = f"rank {self._rank.rank}"
            return [f"the checkpoint of step {save.step} is given up: {name} can't write its part ({_describe(error)})"]
        if num_saved == len(save.ranks):
            self._save = None
            if self._rank.is_leader:
                self._publishing.append((save.step, self._backroom.submit(lambda: self._publish(save))))
        return []

    def _publish(self, save: _Save) -> str:
        """What a person shall know of it."""
        catalogue, settings = self._catalogue, self._settings
        index = publish(catalogue, save.partial, save.step, save.ranks, save.facts, self._files)
        text = f"saved step {save.step}: {catalogue.path_of(save.step)}, {index.num_bytes / 1e6:,.1f} MB"
        try:
            catalogue.tidy(
                keep_last=settings.keep_last,
                keep_every=settings.keep_every,
                weights_only=settings.keep_every_weights_only,
            )
        except (OSError, CheckpointError) as error:
            return f"{text}; older ones stay as they are ({_describe(error)})"
        return text

    def _finish(self) -> list[str]:
        """Waits until the save under way, if there is one, has been settled by all ranks."""
        texts: list[str] = []
        while (save := self._save) is not None:
            save.pace.hurry()  # training waits
            self._wait(save.written)
            word = self.word()
            counts = torch.tensor([float(word.is_on_disk), float(word.has_failed)], dtype=torch.float64)
            self._rank.groups.world.all_reduce(counts)
            num_saved, num_not_saved = (int(count) for count in counts.tolist())
            texts += self._settle(num_saved, num_not_saved)
        return texts

    def _wait(self, future: Future[Any]) -> None:
        token = self._rank.token
        with token.waiting():
            while not future.done():
                token.sleep(POLL_S)

    def _give_up(self) -> None:
        if self._save is not None:
            self._save.given_up.set()
            self._save.pace.hurry()
            self._save = None

    def _news(self) -> list[str]:
        """Of checkpoints that this rank, the leader, was to publish."""
        texts = []
        while self._publishing and self._publishing[0][1].done():
            step, future = self._publishing.popleft()
            error = future.exception()
            if error is not None:
                texts.append(f"the checkpoint of step {step} is given up: it can't be published ({_describe(error)})")
                continue
            texts.append(future.result())  # bounded: it is done
        return texts

    def _as_leader(self, text: str) -> list[str]:
        return [text] if self._rank.is_leader else []


@dataclass
class _Write:
    """A rank's part of a save, done on its thread; it keeps nothing else alive."""

    catalogue: Catalogue
    partial: Path
    rank: int
    is_leader: bool
    snapshot: Snapshot
    pace: Pace
    given_up: threading.Event

    def __call__(self) -> None:
        if self.is_leader:
            with suppress(OSError):  # what can't be removed is in nobody's way
                self.catalogue.remove_leftovers(keep=self.partial)
        write_part(self.catalogue.disk, self.partial, self.rank, self.snapshot, check=self._check)

    def _check(self) -> None:
        self.pace.rest()
        if self.given_up.is_set():
            raise SaveAbandoned


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror or error)
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
