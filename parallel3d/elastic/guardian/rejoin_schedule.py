"""When a guardian offers to start another worker in the place of one that it has lost. Pure.

At first it waits hardly longer than the run needs to go on without the lost worker: until another one comes, a replica
computes less. After each of several losses in a minute it waits four times as long as after the one before; after too
many in an hour it stays out: a device that is broken would only disturb the run again and again.

The place of a worker that left since it was slow stays empty for a probation, which is twice as long as the last one if
the worker after that left within an hour for the same reason. It counts as a loss.
"""

from __future__ import annotations

BACKOFF_S = 0.25
"""Before the first offer of a slot."""
BACKOFF_FACTOR = 4
"""By which the next wait is longer."""
BACKOFF_COUNTED_S = 60.0
"""For how long a loss lengthens the waits after the next ones: so none is much longer than this."""
COUNTED_S = 3600.0
"""For how long a loss counts as one of those after which a slot stays out."""


class RejoinSchedule:
    """The slots of one guardian, one for each of its first workers; times are of one clock, in seconds."""

    def __init__(self, max_rejoins: int, probation_s: float):
        self._max_rejoins = max_rejoins
        self._probation_s = probation_s
        self._probations: dict[int, tuple[float, float]] = {}
        """The last one of each slot: its length, and when it ended or ends."""
        self._losses: dict[int, list[float]] = {}
        """When each slot has lost its workers."""
        self._due: dict[int, float] = {}
        """When each slot is to be offered."""
        self._offered: set[int] = set()

    def on_lost(self, slot: int, now_s: float) -> None:
        """Notes that the worker of a slot is lost."""
        num_recent = sum(now_s - loss_s < BACKOFF_COUNTED_S for loss_s in self._losses.get(slot, ()))
        self._leave(slot, now_s, BACKOFF_S * BACKOFF_FACTOR**num_recent)

    def on_left_slow(self, slot: int, now_s: float) -> None:
        """Notes that the worker of a slot has left since it was slow."""
        last_s, ended_s = self._probations.get(slot, (0.0, float("-inf")))
        wait_s = 2 * last_s if now_s - ended_s < COUNTED_S else self._probation_s
        self._probations[slot] = wait_s, now_s + wait_s
        self._leave(slot, now_s, wait_s)

    def _leave(self, slot: int, now_s: float, wait_s: float) -> None:
        losses = self._losses[slot] = [loss_s for loss_s in self._losses.get(slot, ()) if now_s - loss_s < COUNTED_S]
        if len(losses) < self._max_rejoins:
            self._due[slot] = now_s + wait_s
        losses.append(now_s)

    def take_due(self, now_s: float) -> list[int]:
        """Returns the slots to offer now, each once."""
        due = sorted(slot for slot, due_s in self._due.items() if now_s >= due_s)
        for slot in due:
            del self._due[slot]
        self._offered.update(due)
        return due

    @property
    def offered(self) -> list[int]:
        """The slots that were offered and not taken: a new coordinator does not know of them."""
        return sorted(self._offered)

    @property
    def is_pending(self) -> bool:
        """Whether a slot is offered, or will be."""
        return bool(self._due or self._offered)

    def take(self, slot: int) -> bool:
        """The coordinator takes the offer of a slot; False if there is none."""
        is_offered = slot in self._offered
        self._offered.discard(slot)
        return is_offered

    def end(self) -> None:
        """The run ends, or its workers here leave: nothing is offered any more."""
        self._max_rejoins = 0
        self._due.clear()
        self._offered.clear()
