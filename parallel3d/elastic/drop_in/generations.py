"""Takes one worker of a training loop from one membership generation into the next.

    leave     abort what is in flight
    report    the position, and the newest entry
    resolve   complete the step that another worker has completed and this one has not
    share     one worker sends its state to those that join; at the start, to all others
    confirm   wait until all have what they need
    regroup   connect with the others

Every worker holds all state, so a loss moves nothing. A joiner takes the state of whichever worker the record names:
before or after the optimizer's step, it then does what that one does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from parallel3d.elastic.drop_in.loop_state import LoopState
from parallel3d.elastic.protocol.membership import (
    NO_GENERATION,
    Address,
    GenerationRecord,
    LogPosition,
    StateReport,
    digest_entries,
)
from parallel3d.elastic.worker.membership_client import MembershipClient, PendingGeneration
from parallel3d.errors import GenerationEnded
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.group import Group


class LeftRun(SystemExit):
    """This worker ends here: the run is over, or goes on without it."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True, kw_only=True)
class LoopGroups:
    """The groups of a generation, of all workers that compute."""

    gradients: Group
    entries: Group
    """For tensors on the host; the same one on CPUs."""

    @property
    def all(self) -> tuple[Group, ...]:
        return (self.gradients,) if self.gradients is self.entries else (self.gradients, self.entries)


class LoopNetwork(Protocol):
    """Builds the groups of a worker."""

    def listen(self) -> Address:
        """Returns an address at which others can find out whether this host can be reached."""

    def make_host_group(self, name: str, ranks: tuple[int, ...], token: AbortToken) -> Group: ...

    def make_groups(self, record: GenerationRecord, token: AbortToken) -> LoopGroups: ...


class Generations:
    """The membership of one worker."""

    def __init__(
        self,
        *,
        rank: int,
        membership: MembershipClient,
        network: LoopNetwork,
        state: LoopState,
        host: str,
        publish: Callable[[dict[str, Any]], None],
    ):
        self.rank = rank
        self.record: GenerationRecord | None = None
        """Record of the newest committed generation."""
        self.token = AbortToken()
        self.groups: LoopGroups | None = None
        self._membership = membership
        self._network = network
        self._state = state
        self._host = host
        self._publish = publish

    @property
    def is_leader(self) -> bool:
        return self.record is not None and self.rank == self.record.leader

    @property
    def workers(self) -> tuple[int, ...]:
        """Those that compute."""
        assert self.record is not None
        return self.record.grid.ranks

    def enter(self, suspicion: str = "") -> None:
        """Returns once this worker computes in a committed generation; raises LeftRun when it should end.

        `suspicion` says why it has left its last one.
        """
        self._membership.announce_ready()
        while (pending := self._membership.next_generation(self._report, suspicion=suspicion)) is not None:
            try:
                self._join(pending)
                if self.rank in pending.record.draining:
                    raise LeftRun
                if pending.record.grid.holds(self.rank):
                    return
                suspicion = ""  # a spare waits for the next change
            except GenerationEnded as error:
                suspicion = str(error)
            self.leave(suspicion)
        raise LeftRun

    def leave(self, reason: str) -> None:
        """Ends all that is in flight."""
        self.token.abort(reason or "this worker has left the generation")
        if self.groups is not None:
            for group in self.groups.all:
                group.abort()
                group.close()
            self.groups = None

    def _report(self, generation: int) -> StateReport:
        entries = self._state.encode_newest()
        return StateReport(
            rank=self.rank,
            generation=generation,
            state_generation=NO_GENERATION if self.record is None else self.record.generation,
            position=LogPosition(iteration=self._state.position),
            entries=entries,
            digest=digest_entries(entries),
            version=self._state.position,
            host=self._host,
            address=self._network.listen(),
        )

    def _join(self, pending: PendingGeneration) -> None:
        record, self.token = pending.record, pending.token
        has_place = record.grid.holds(self.rank)
        if pending.entries and record.previous is not None and record.previous.holds(self.rank):
            self._state.apply_entry(pending.entries)
        moved_bytes = self._share_state(record)
        digest = self._state.begin_generation(record, is_proposed=True) if has_place else ""
        self._membership.confirm(record.generation, digest=digest, moved_bytes=moved_bytes)
        started = time.perf_counter()
        self.record = record
        if not has_place:
            return
        self._state.begin_generation(record, is_proposed=False)
        self.groups = self._network.make_groups(record, self.token)
        if self.is_leader and record.previous is not None:
            seconds, number = time.perf_counter() - started, len(record.grid.ranks)
            text = f"{number} worker{'s' if number > 1 else ''}"
            self._publish({"kind": "resumed", "generation": record.generation, "regroup_s": seconds, "plan": text})

    def _share_state(self, record: GenerationRecord) -> int:
        """Sends this worker's state to those that lack it, or receives it; returns the bytes received."""
        if record.previous is None:
            source, others = record.grid.ranks[0], record.grid.ranks[1:]
        else:
            source, others = record.state_source, record.joiners
        if not others or self.rank not in (source, *others):
            return 0
        ranks = (source, *others)
        group = self._network.make_host_group(f"generation{record.generation}/state", ranks, self.token)
        try:
            words = self._state.encode_state() if self.rank == source else torch.zeros(1, dtype=torch.int64)
            size = group.all_reduce(torch.tensor([len(words) if self.rank == source else 0]))
            if self.rank == source:
                group.all_reduce(words)
                return 0
            received = group.all_reduce(torch.zeros(int(size), dtype=torch.int64))  # zeros leave all bits as they are
            self._state.load_state(received)
            return received.nbytes
        finally:
            group.close()
