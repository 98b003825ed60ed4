"""Communicators of neighbouring ranks that are threads: they stand for NCCL's, with its promises and no more.

A send holds the sender's tensor, not a copy, and a receive may return before there is data: `wait` gets it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from parallel3d.inprocess.world import ThreadWorld
from parallel3d.parallel.device_links import Pair


@dataclass
class Sent:
    """A tensor under way."""

    tensor: Tensor
    is_received: bool = False

    def wait(self) -> None: ...

    def is_done(self) -> bool:
        return self.is_received


@dataclass
class Received:
    """A receive under way."""

    receive: Callable[[], None]

    def wait(self) -> None:
        self.receive()


@dataclass
class ThreadPair:
    """One rank's end of a pair."""

    world: ThreadWorld
    rank: int
    queue: deque[Sent]
    name: str
    is_busy: bool = False

    def send_async(self, tensor: Tensor) -> Sent:
        sent = Sent(tensor)
        self.world.run_locked(lambda: self.queue.append(sent))
        return sent

    def receive_async(self, tensor: Tensor) -> Received:
        def receive() -> None:
            self.world.wait(self.rank, lambda: bool(self.queue), lambda: f"for data of {self.name}")
            sent = self.world.run_locked(self.queue.popleft)
            tensor.copy_(sent.tensor)
            sent.is_received = True

        return Received(receive)

    def abort(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class ThreadPairs:
    """All pairs of a run, by name; `count` sends are what went through them."""

    world: ThreadWorld
    queues: dict[str, deque[Sent]] = field(default_factory=dict)

    def make_pair(self, rank: int) -> Callable[[str, Pair], ThreadPair]:
        """Returns the factory that `build_groups` takes."""

        def make(name: str, pair: Pair) -> ThreadPair:
            assert rank in pair
            queue = self.world.run_locked(lambda: self.queues.setdefault(name, deque()))
            return ThreadPair(self.world, rank, queue, name)

        return make
