"""Messages of the simulated run: the slots of each ordered pair of replicas, and early reads.

A slot is taken when a compute that will fill it starts and is free again when its message is read. Messages of a pair
are read in the order sent. Without chunks only the oldest unread activation or gradient of a pair may be used next, so
nothing but targets needs bookkeeping. With chunks a pair carries activations, gradients and targets in turn:
messages in front of the one that is needed are read with it and kept.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from parallel3d.pipeline.instructions import Op

Message = tuple[Op, int]
"""(the receive that takes it, number of the virtual micro-batch)"""


class Mailboxes:
    """Slots and unread messages of all ordered pairs of one component's replicas."""

    def __init__(
        self,
        num_replicas: int,
        *,
        slots: int,
        early_read_at: int,
        tracks_all: bool,
        wake: Callable[[int], None],
        record: Callable[[int, Op, int], None],
    ):
        """`wake(replica)` is called when a replica may have work, `record(replica, op, number)` when it reads early.

        A reader reads early once `early_read_at` slots of a pair are taken. `tracks_all`: tracks all messages, not only
        targets.
        """
        self._num_replicas, self._slots, self._early_read_at = num_replicas, slots, early_read_at
        self._tracks_all, self._wake, self._record = tracks_all, wake, record
        self._taken: dict[int, int] = defaultdict(int)
        """Slots of a pair that hold an unread message or are reserved by a compute."""
        self._unread: list[dict[int, deque[Message]]] = [defaultdict(deque) for _ in range(num_replicas)]
        """By reader and source."""
        self._arrivals: list[dict[Message, int]] = [{} for _ in range(num_replicas)]
        """The order of unread messages over all pairs of a reader."""
        self._read_unused: list[set[Message]] = [set() for _ in range(num_replicas)]

    def num_taken(self, source: int, reader: int) -> int:
        return self._taken[source * self._num_replicas + reader]

    def is_free(self, source: int, reader: int) -> bool:
        """Whether the pair has a slot for one more message."""
        return self._taken[source * self._num_replicas + reader] < self._slots

    def take_slot(self, source: int, reader: int) -> None:
        self._taken[source * self._num_replicas + reader] += 1

    def deliver(self, source: int, reader: int, op: Op, number: int) -> None:
        """Puts a message into the slot reserved for it."""
        if self._tracks_all or op is Op.RECV_TARGETS:
            self._unread[reader][source].append((op, number))
            self._arrivals[reader][op, number] = len(self._arrivals[reader])
        self._wake(reader)

    def read(self, reader: int, source: int, op: Op, number: int) -> None:
        """Reads a message for immediate use, unless it was read early; older ones of its pair are read first."""
        if self._tracks_all or op is Op.RECV_TARGETS:
            message = (op, number)
            if message in self._read_unused[reader]:
                self._read_unused[reader].remove(message)
                return
            while self._unread[reader][source][0] != message:
                self.read_early(reader, source)
            self._unread[reader][source].popleft()
        self._free_slot(source, reader)

    def read_from_full_pairs(self, reader: int) -> None:
        """Frees a slot of each full pair that holds tracked messages.

        Messages are read in order of arrival: a later one may come from a replica that waits for the slot of an earlier
        one.
        """
        queues, arrivals = self._unread[reader], self._arrivals[reader]
        while full := [s for s, queue in queues.items() if queue and self.num_taken(s, reader) >= self._early_read_at]:
            self.read_early(reader, min(full, key=lambda source: arrivals[queues[source][0]]))

    def read_early(self, reader: int, source: int) -> None:
        """Reads the oldest message of a pair and keeps it."""
        message = self._unread[reader][source].popleft()
        self._read_unused[reader].add(message)
        self._record(reader, *message)
        self._free_slot(source, reader)

    def _free_slot(self, source: int, reader: int) -> None:
        self._taken[source * self._num_replicas + reader] -= 1
        self._wake(source)
