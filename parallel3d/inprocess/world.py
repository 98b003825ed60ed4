"""Ranks as threads of one process: the same code as on real groups, in milliseconds, deterministic, CPU only.

`run_threads(n, function)` calls `function(rank, world)` in n threads. Every blocking wait of a world goes through one
condition, so a deadlock is known the moment it happens: all live ranks wait and none of what they wait for is there.
Then each raises DeadlockError with the table of who waits for what, instead of hanging.

`world.die_at(rank, call)` makes a rank die (RankDied) as it makes its n-th communication call; the others' tokens are
aborted, as a coordinator would do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.group import Group, SoloGroup, Work
from parallel3d.parallel.p2p_messages import Header, Links, verify_header
from parallel3d.wait_graph import HangReportLine, format_hang_report

T = TypeVar("T")


class DeadlockError(AssertionError):
    """All live ranks wait for something that can't come; the message says who waits for what."""


class RankDied(Exception):
    """An injected death; the thread ends here."""


class ThreadWorld:
    """What the threads of one run share."""

    def __init__(self, num_ranks: int, *, slots: int = 3):
        self.num_ranks = num_ranks
        self.slots = slots
        self.tolerates_deaths = False
        """A death (RankDied) is not everybody's failure: who watches over the world (a coordinator) has been told."""
        self.tokens = [AbortToken() for _ in range(num_ranks)]
        self._changed = threading.Condition()
        self._alive = set(range(num_ranks))
        self._waiting: dict[int, tuple[Callable[[], bool], Callable[[], str], AbortToken]] = {}
        self._deadlock: str | None = None
        self._calls = [0] * num_ranks
        self._deaths: dict[int, int] = {}
        self._collectives: dict[tuple[str, int], _Collective] = {}
        self._queues: dict[tuple[int, int, int], deque[tuple[Header, Tensor]]] = {}
        self._doing = ["" for _ in range(num_ranks)]
        for token in self.tokens:
            token.on_abort(self._notify_all)

    def begin_generation(self, rank: int, token: AbortToken) -> None:
        """From now on the rank waits with this generation's token."""
        self.tokens[rank] = token
        token.on_abort(self._notify_all)

    def make_group(self, rank: int) -> Callable[[str, tuple[int, ...]], Group]:
        """The factory that `build_groups` asks for."""

        def make(name: str, ranks: tuple[int, ...]) -> Group:
            if len(ranks) == 1:
                return SoloGroup(name=name, rank=rank)
            return ThreadGroup(self, name=name, rank=ranks.index(rank), ranks=ranks)

        return make

    def links(self, rank: int, generation: int = 0) -> ThreadLinks:
        return ThreadLinks(self, rank, generation)

    def die_at(self, rank: int, call: int) -> None:
        """Makes `rank` die at its `call`-th communication call (1-based)."""
        self._deaths[rank] = call

    def doing(self, rank: int, what: str) -> None:
        """Says what a rank is at (an instruction), for the deadlock report."""
        self._doing[rank] = what

    # --- for groups and links -------------------------------------------------------------------------------------

    def count_call(self, rank: int) -> None:
        """Counts a communication call; the injected death happens here."""
        self._calls[rank] += 1
        if self._calls[rank] == self._deaths.get(rank):
            raise RankDied(f"rank {rank} dies at its call {self._calls[rank]}")
        self.tokens[rank].check()

    def wait(
        self, rank: int, ready: Callable[[], bool], what: Callable[[], str], *, token: AbortToken | None = None
    ) -> None:
        """Blocks `rank` until `ready()`, its token (the rank's, if none is given) is aborted, or nobody can move.

        `what()` says what for, and is asked when the table of a deadlock is made.
        """
        token = token or self.tokens[rank]
        with self._changed:
            self._waiting[rank] = (ready, what, token)
            try:
                self._detect_deadlock()
                while not ready() and not token.aborted and self._deadlock is None:
                    self._changed.wait(timeout=60.0)
                if ready():
                    return
                token.check()
                raise DeadlockError(self._deadlock or f"rank {rank} waited 60 s: {what()}")
            finally:
                del self._waiting[rank]

    def run_locked(self, action: Callable[[], T]) -> T:
        """Runs `action` under the world's lock and wakes everybody."""
        with self._changed:
            result = action()
            self._changed.notify_all()
            return result

    def on_rank_end(self, rank: int, error: BaseException | None) -> None:
        """A rank's thread is over; its failure is everybody's, and known before the rank counts as gone."""
        if error is not None and not (self.tolerates_deaths and isinstance(error, RankDied)):
            for token in self.tokens:
                token.abort(f"rank {rank}: {error}")
        with self._changed:
            self._alive.discard(rank)
            self._detect_deadlock()
            self._changed.notify_all()

    def _detect_deadlock(self) -> None:
        if self._alive and self._alive <= set(self._waiting) and self._deadlock is None:
            waits = {rank: self._waiting[rank] for rank in sorted(self._alive)}
            if not any(ready() or token.aborted for ready, _, token in waits.values()):
                table = [
                    HangReportLine(rank=r, doing=self._doing[r], remark=f"waits {w()}")
                    for r, (_, w, _) in waits.items()
                ]
                self._deadlock = f"deadlock:\n{format_hang_report(table)}"
                self._changed.notify_all()

    def _notify_all(self) -> None:
        with self._changed:
            self._changed.notify_all()


@dataclass
class _Collective:
    """One call of a group, met by its members one after the other."""

    operation: str
    tensors: dict[int, Tensor] = field(default_factory=dict)
    result: Tensor | None = None
    num_read: int = 0


class ThreadGroup(Group):
    """Collectives among threads: sums run in rank order, so that results never depend on timing."""

    def __init__(self, world: ThreadWorld, *, name: str, rank: int, ranks: tuple[int, ...]):
        super().__init__(name=name, rank=rank, ranks=ranks)
        self._world = world
        self._sequence = 0

    def all_reduce_async(self, tensor: Tensor) -> Work:
        return self._post("all-reduce", tensor, _sum, lambda total: tensor.copy_(total.view_as(tensor)))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        work = self._post("all-reduce max", tensor, _max, lambda top: tensor.copy_(top.view_as(tensor)))
        work.wait()  # bounded: waits with the world's tokens
        return tensor

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> Work:
        def consume(total: Tensor) -> None:
            output.copy_(total.view(-1).chunk(self.size)[self.rank].view_as(output))

        assert tensor.numel() == output.numel() * self.size, f"{self.name}: {tensor.shape} -> {output.shape}"
        return self._post("reduce-scatter", tensor, _sum, consume)

    def all_gather_async(self, output: Tensor, tensor: Tensor) -> Work:
        assert output.numel() == tensor.numel() * self.size, f"{self.name}: {tensor.shape} -> {output.shape}"
        return self._post("all-gather", tensor, _concatenate, lambda whole: output.copy_(whole.view_as(output)))

    def _post(
        self,
        operation: str,
        tensor: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
        consume: Callable[[Tensor], object],
    ) -> Work:
        """Leaves a copy of this rank's tensor; the last rank to come combines them all."""
        me = self.ranks[self.rank]
        self._world.count_call(me)
        self._sequence += 1
        key = (self.name, self._sequence)

        def leave() -> _Collective:
            call = self._world._collectives.setdefault(key, _Collective(operation))
            assert call.operation == operation, f"{self.name} call {key[1]}: {operation} meets {call.operation}"
            call.tensors[self.rank] = tensor.detach().clone()
            if len(call.tensors) == self.size:
                call.result = combine([call.tensors[r] for r in range(self.size)])
            return call

        call = self._world.run_locked(leave)
        return _ThreadWork(self, key, call, consume)

    def finish(self, key: tuple[str, int], call: _Collective, consume: Callable[[Tensor], object]) -> None:
        me = self.ranks[self.rank]

        def what() -> str:
            missing = [self.ranks[r] for r in range(self.size) if r not in call.tensors]
            return f"for {call.operation} {key[1]} of {self.name}, not there: ranks {missing}"

        self._world.wait(me, lambda: call.result is not None, what)
        assert call.result is not None
        with torch.no_grad():
            consume(call.result)

        def leave() -> None:
            call.num_read += 1
            if call.num_read == self.size:
                del self._world._collectives[key]

        self._world.run_locked(leave)


class _ThreadWork:
    """A posted collective; waiting twice is the same as once."""

    def __init__(
        self, group: ThreadGroup, key: tuple[str, int], call: _Collective, consume: Callable[[Tensor], object]
    ) -> None:
        self._finish: Callable[[], None] | None = lambda: group.finish(key, call, consume)

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
            self._finish = None


class ThreadLinks(Links):
    """Messages between threads, with the same slots as the sockets have on the sender's side."""

    def __init__(self, world: ThreadWorld, rank: int, generation: int):
        self._world = world
        self._rank = rank
        self._generation = generation

    def send(self, destination: int, header: Header, tensor: Tensor, *, bounded: bool = True) -> None:
        self._world.count_call(self._rank)
        queue = self._queue(self._rank, destination)
        self._world.wait(
            self._rank,
            lambda: len(queue) < self._world.slots or not bounded,
            lambda: f"for a free slot to rank {destination} to send {header}",
        )
        message = (header, tensor.detach().clone())
        self._world.run_locked(lambda: queue.append(message))

    def receive(self, source: int, expected: Header) -> Tensor:
        self._world.count_call(self._rank)
        queue = self._queue(source, self._rank)
        self._world.wait(self._rank, lambda: bool(queue), lambda: f"for rank {source} to send {expected}")
        header, tensor = self._world.run_locked(queue.popleft)
        verify_header(source, header, expected)
        return tensor

    def close(self) -> None:
        return None

    def _queue(self, source: int, destination: int) -> deque[tuple[Header, Tensor]]:
        return self._world.run_locked(
            lambda: self._world._queues.setdefault((self._generation, source, destination), deque())
        )


def run_threads(
    num_ranks: int,
    function: Callable[[int, ThreadWorld], T],
    *,
    world: ThreadWorld | None = None,
    timeout_s: float = 300.0,
) -> list[T]:
    """The results of `function(rank, world)` by rank, None for the dead; the first real error of any rank is raised."""
    world = world or ThreadWorld(num_ranks)
    results: list[T | None] = [None] * num_ranks
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        error: BaseException | None = None
        try:
            results[rank] = function(rank, world)
        except BaseException as raised:  # noqa: BLE001 - carried to the caller below
            error = raised
            if not (world.tolerates_deaths and isinstance(raised, RankDied)):
                errors.append((rank, raised))
        world.on_rank_end(rank, error)

    threads = [
        threading.Thread(target=body, args=(rank,), daemon=True, name=f"rank-{rank}") for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=timeout_s)
    if errors:
        raise errors[0][1]
    return results  # type: ignore[return-value]


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _max(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).amax(0)


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
