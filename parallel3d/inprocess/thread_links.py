"""Point-to-point links between ranks that are threads."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from parallel3d.inprocess.scheduler import ThreadScheduler
from parallel3d.parallel.p2p_messages import Header, Links, verify_header


class ThreadLinks(Links):
    """Messages between threads, with slots as sockets have; `queues` by (generation, source, destination)."""

    def __init__(
        self,
        scheduler: ThreadScheduler,
        queues: dict[tuple[int, int, int], deque[tuple[Header, Tensor]]],
        rank: int,
        generation: int,
        *,
        slots: int,
    ):
        self._scheduler = scheduler
        self._queues = queues
        self._rank = rank
        self._generation = generation
        self._slots = slots

    def send(self, destination: int, header: Header, tensor: Tensor, *, bounded: bool = True) -> None:
        self._scheduler.count_call(self._rank)
        queue = self._queue(self._rank, destination)
        self._scheduler.wait(
            self._rank,
            lambda: len(queue) < self._slots or not bounded,
            lambda: f"for a free slot to rank {destination} to send {header}",
        )
        message = (header, tensor.detach().clone())
        self._scheduler.run_locked(lambda: queue.append(message))

    def receive(self, source: int, expected: Header) -> Tensor:
        self._scheduler.count_call(self._rank)
        queue = self._queue(source, self._rank)
        self._scheduler.wait(self._rank, lambda: bool(queue), lambda: f"for rank {source} to send {expected}")
        header, tensor = self._scheduler.run_locked(queue.popleft)
        verify_header(source, header, expected)
        return tensor

    def close(self) -> None:
        return None

    def _queue(self, source: int, destination: int) -> deque[tuple[Header, Tensor]]:
        return self._scheduler.run_locked(
            lambda: self._queues.setdefault((self._generation, source, destination), deque())
        )
