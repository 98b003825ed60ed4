"""Ranks as threads of one process: the same code as on real groups, in milliseconds, deterministic, CPU only.

`run_threads(n, function)` calls `function(rank, world)` in n threads. `world.die_at(rank, call)` makes a rank die
(RankDied) at its n-th communication call; the others' tokens are aborted, as a coordinator would do.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from parallel3d.inprocess.scheduler import RankDied, ThreadScheduler
from parallel3d.inprocess.thread_group import Collective, ThreadGroup
from parallel3d.inprocess.thread_links import ThreadLinks
from parallel3d.inprocess.thread_streams import Queues, thread_streams
from parallel3d.parallel.group import Group, SoloGroup
from parallel3d.parallel.groups import is_world
from parallel3d.parallel.p2p_messages import Header
from parallel3d.parallel.tree_group import TreeGroup

T = TypeVar("T")


class ThreadWorld(ThreadScheduler):
    """The groups and links of one run's threads; `slots` as in `Links`."""

    def __init__(self, num_ranks: int, *, slots: int = 3):
        super().__init__(num_ranks)
        self.slots = slots
        self._collectives: dict[tuple[str, int], Collective] = {}
        self._stream_queues: Queues = defaultdict(deque)
        self._queues: dict[tuple[int, int, int], deque[tuple[Header, Tensor]]] = {}

    def make_group(self, rank: int) -> Callable[[str, tuple[int, ...]], Group]:
        """Returns the factory that `build_groups` takes."""

        def make(name: str, ranks: tuple[int, ...]) -> Group:
            if len(ranks) == 1:
                return SoloGroup(name=name, rank=rank)
            if is_world(name):
                streams = thread_streams(self, self._stream_queues, name, rank)
                return TreeGroup(
                    name=name, rank=ranks.index(rank), ranks=ranks, streams=streams, token=self.tokens[rank]
                )
            return ThreadGroup(self, self._collectives, name=name, rank=ranks.index(rank), ranks=ranks)

        return make

    def links(self, rank: int, generation: int = 0) -> ThreadLinks:
        return ThreadLinks(self, self._queues, rank, generation, slots=self.slots)


def run_threads(
    num_ranks: int,
    function: Callable[[int, ThreadWorld], T],
    *,
    world: ThreadWorld | None = None,
    timeout_s: float = 300.0,
) -> list[T]:
    """Returns the results of `function(rank, world)` by rank, None for dead ones; raises the first error of a rank."""
    world = world or ThreadWorld(num_ranks)
    results: list[T | None] = [None] * num_ranks
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        error: BaseException | None = None
        try:
            results[rank] = function(rank, world)
        except BaseException as raised:  # noqa: BLE001 - raised below
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
