"""The coordinator that takes over after its predecessor is lost: on the same host if only the process was, else on that
of a failover candidate.

It begins with a quorum check: guardians connect, then their workers, each with the number of its newest committed
generation. The run goes on from the newest of all, whose record one of its holders sends: a worker that holds it proves
that all members had confirmed it. Then everything on the lost host is evicted by an ordinary change of membership, and
the coordinator serves as usual.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.coordinator import Coordinator
from parallel3d.elastic.coordinator.membership_manager import MembershipManager
from parallel3d.elastic.coordinator.witness import Witness
from parallel3d.elastic.coordinator.worker_numbers import WorkerNumbers
from parallel3d.elastic.protocol.actions import Action, FinishRun
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo, QuorumCheck, check_quorum
from parallel3d.elastic.protocol.membership import NO_GENERATION, GenerationRecord, LostWorker
from parallel3d.elastic.protocol.record_delta import decode_record
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.monitor.sinks import RunReporter
from parallel3d.parallel.grid import PartId

QUORUM_TICK_S = 0.1


class ResumedProtocol(MembershipProtocol):
    """Goes on from `committed`; `newest_generation` is the highest number that any worker has received."""

    def __init__(self, elastic: ElasticSettings, committed: GenerationRecord, *, newest_generation: int):
        super().__init__(elastic.grid, **elastic.protocol_options)
        self.live = frozenset(committed.members) - set(committed.draining)
        self.committed = committed
        self.last_reported_step = committed.last_reported_step
        self._grid = committed.grid
        self._generation = max(newest_generation, committed.generation)
        self._parts |= {rank: committed.grid.part(rank) for rank in committed.grid.ranks} | dict(committed.parts)
        self._hosts = dict(committed.hosts)
        self._newest = committed.position

    def has_left(self, rank: int, part: PartId | None) -> bool:
        """Whether this member of the committed generation has left it, to build `part` instead of its own."""
        return rank in self.live and part is not None and part != self._parts[rank]

    def begin(self, reason: str) -> list[Action]:
        """Begins a change that no worker has asked for."""
        return self._begin(reason)


class FailoverCoordinator(Coordinator):
    """Takes over according to `failover_plan`, or ends the run on this side. Calls `open_report` once it serves."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        failover_plan: FailoverPlan,
        witness: Witness,
        open_report: Callable[[], RunReporter],
        world_size: int,
        timeouts: LaunchTimeouts,
        elastic: ElasticSettings,
        own_info: GuardianInfo,
        on_turn: Callable[[], None] = lambda: None,
        numbers: WorkerNumbers | None = None,
    ):
        super().__init__(
            listener,
            secret=secret,
            world_size=world_size,
            emit=lambda record: None,
            timeouts=timeouts,
            elastic=replace(elastic, coordinator_host=None),  # it stays where it is
            own_info=own_info,
            on_turn=on_turn,
            witness=witness,
            numbers=numbers,
        )
        self._failover_plan = failover_plan
        lost = failover_plan.coordinator
        self._is_same_host = own_info.ranks == lost.ranks
        """The lost coordinator's own stub has replaced it: nothing else of its host is lost."""
        self._lost_host = lost.host
        self._lost_s = time.monotonic()
        survivors = failover_plan.guardians if self._is_same_host else failover_plan.surviving_guardians
        self._expected = {rank for guardian in survivors for rank in guardian.ranks}
        self._open_report = open_report
        self._is_checking_quorum = True
        self._fetched: GenerationRecord | None = None
        """The committed record that a worker has sent."""
        self._asked_rank = -1
        """The worker that was asked for it last."""
        self._deferred: list[tuple[Connection, dict[str, Any], bytes]] = []
        """Messages that arrive during the quorum check."""

    def _make_membership(self) -> MembershipManager | None:
        return None  # until it is known where to go on from

    def _on_message(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        if header["op"] == "committed":
            if connection.rank == self._asked_rank:
                self._fetched = decode_record(payload, None)
        elif self._is_checking_quorum and header["op"] != "hello":
            self._deferred.append((connection, header, payload))
        else:
            super()._on_message(connection, header, payload)

    def _on_disconnect(self, connection: Connection) -> None:
        if not self._is_checking_quorum:
            super()._on_disconnect(connection)
        elif connection.rank is not None:
            self._stall_check.fences.on_connection_lost(connection.rank, connection.lost_because, time.monotonic())
        else:
            self._stall_check.fences.on_guardian_lost(connection.guarded_ranks)

    def _begin(self) -> None:
        deadline = time.monotonic() + self._timeouts.failover_s
        while not self._all_connected() and time.monotonic() < deadline:
            self._poll(QUORUM_TICK_S)
        base = self._fetch_newest_record()
        self._is_checking_quorum = False
        quorum = self._check_quorum()
        if quorum.has_quorum and base:
            self._resume(base)
        elif quorum.has_quorum and self._let_go("finished"):
            self._complete()
        else:
            self._give_up(quorum.reason or "no remaining worker has begun to train")
        for connection, header, payload in self._deferred:
            self._server.dispatch(connection, header, payload)

    def _resume(self, base: GenerationRecord) -> None:
        """Serves from the committed generation `base`, then begins the change that evicts the lost host."""
        assert self._elastic is not None
        newest_generation = max(
            connection.hello["membership_state"]["newest_generation"] for connection in self._server.workers.values()
        )
        protocol = ResumedProtocol(self._elastic, base, newest_generation=newest_generation)
        membership = self._membership = self._manage(protocol)
        self._status.mark_gone(self._status.workers.keys() & base.draining)  # they leave once they get its commit
        self._readmit(membership, protocol)
        report = self._begin_report()
        protocol.last_reported_step = self._last_published["step"] = max(base.last_reported_step, report.last_step)
        self._last_published["evaluation"] = report.last_evaluation
        self._drains.find_recorded = report.recorded_preemptions
        for rank in base.hosts.keys() - self._status.workers.keys():  # their numbers are never used again
            self._status.add_worker(rank, host=base.hosts[rank], coordinates="")
        self._status.place(base)
        self._status.restore_after_failover(base.hosts, protocol.last_reported_step)
        here = self._guarded_ranks() - {end["rank"] for end in self._ends()}
        joining = {rank for rank in here if membership.is_joining(rank)}
        self._status.mark_gone(self._status.workers.keys() - protocol.live - joining)
        evicted = here & self._server.workers.keys() - protocol.live - joining - set(base.draining)
        self._stall_check.fences.kill(dict.fromkeys(evicted, "evicted before this coordinator took over"))
        self._start_deadline = time.monotonic() + self._timeouts.failover_s
        is_move = self._failover_plan.is_move
        how = "with a new coordinator" if self._is_same_host else "without its coordinator"
        how = "with its coordinator" if is_move else how
        self._emit_notice(f"the run goes on {how} on {self._lost_host}, from generation {base.generation}")
        behind = [
            rank
            for rank, generation in self._committed_generations().items()
            if generation < base.generation and rank in base.members
        ]
        self._server.send_to_workers(behind, {"op": "commit", "generation": base.generation})
        self._take_over_monitoring()
        lost = [self._status.lost_with_guardian(rank) for rank in sorted(protocol.live - self._guarded_ranks())]
        lost += [LostWorker(rank=rank, why="drained") for rank in sorted(protocol.live & self._let_go("drained"))]
        membership.recovery_log.begin(self._lost_s)
        if protocol.live & self._let_go("finished"):
            self._finish_run(membership)
        if lost:
            membership.evict(lost)
        elif not protocol.over:
            why = f"the coordinator moves to {self._lost_host}" if is_move else None
            membership.execute(protocol.begin(why or f"the coordinator on {self._lost_host} is lost"))

    def _on_worker_exits(self, guarded_ranks: Collection[int], ends: Sequence[dict[str, Any]]) -> None:
        """As for any coordinator, and some may have said hello here while they ended: the old one had let them go."""
        membership = self._elastic_membership
        if membership and not membership.protocol.over and membership.protocol.live & _let_go("finished", ends):
            self._finish_run(membership)
        super()._on_worker_exits(guarded_ranks, ends)

    def _finish_run(self, membership: MembershipManager) -> None:
        """Lets all workers of a run end whose last step is done, as the old coordinator knew."""
        membership.protocol.over = True
        membership.execute([FinishRun(ranks=tuple(sorted(membership.protocol.live)))])

    def _begin_report(self) -> RunReporter:
        report = self._open_report()
        self._emit_record, self._flush_records = report.publish, report.flush
        return report

    def _complete(self) -> None:
        """Ends a run whose workers have all ended, let go by the old coordinator: only its summary is missing."""
        report = self._begin_report()
        self._status.restore_after_failover({}, report.last_step)
        self._status.mark_gone(self._status.workers)
        self._emit_notice(f"the coordinator on {self._lost_host} was lost after the run's last step")

    def _readmit(self, membership: MembershipManager, protocol: ResumedProtocol) -> None:
        """Takes over spares, and workers on their way into the run; those that are ready enter at the first change."""
        now_s, ended = time.monotonic(), {end["rank"] for end in self._ends()}
        for rank, connection in self._server.workers.items():
            state = connection.hello["membership_state"]
            part = state["part"] and (state["part"][0], state["part"][1])
            if rank in ended or (rank in protocol.live and not protocol.has_left(rank, part)):
                continue
            if part is not None:
                protocol.release(rank)
                membership.joins.add(rank, part, now_s)
                if state["is_ready"]:
                    membership.joins.admit(rank, protocol)
            elif membership.is_joining(rank):
                membership.joins.add_spare(rank)

    def _take_over_monitoring(self) -> None:
        """Passes the heartbeat timeouts on to guardians that began after they were derived."""
        known = [connection.hello.get("monitor") for connection in self._server.guardians()]
        if timeouts := next(filter(None, known), None):
            self._monitor_frame = {"op": "monitor", **timeouts}
            self._server.send_to_guardians(self._monitor_frame)

    def _learn_ranks(self, hello: dict[str, Any]) -> None:
        """Takes notice of workers that have joined the run, or were about to: after the quorum check they are out."""
        if hello["role"] == "guardian":
            unknown = {*hello["ranks"], *hello.get("joined", ())} - self._status.workers.keys()
            for rank in unknown:
                self._status.add_worker(rank, host=hello["host"], coordinates="")
            if not self._is_checking_quorum:
                self._status.mark_gone(unknown)

    def _give_up(self, reason: str) -> None:
        """Ends the run on this side. Workers out of reach have guardians of their own."""
        self._status.record_lost_quorum(reason)
        self._status.mark_gone(self._status.workers)
        self._shutdown.abort_after_failure()

    def _all_connected(self) -> bool:
        """True once no further guardian or worker can be expected."""
        if len(self._server.workers) + len(self._ends()) < len(self._expected):  # most calls end here
            return False
        guarded, expected = self._guarded_ranks(), self._expected
        accounted_for = self._server.workers.keys() | {end["rank"] for end in self._ends()}
        return expected <= guarded and guarded <= accounted_for and self._check_quorum().has_quorum

    def _guarded_ranks(self) -> set[int]:
        """The ranks whose guardians are connected."""
        return {rank for connection in self._server.guardians() for rank in connection.guarded_ranks}

    def _check_quorum(self) -> QuorumCheck:
        connected = {tuple(connection.hello["ranks"]) for connection in self._server.guardians()}
        reached = self._failover_plan.reached_hosts(connected)
        return check_quorum(reached, self._failover_plan.hosts, lock_witness=self._lock_witness)

    def _lock_witness(self) -> str:
        return self._witness.try_lock(max(self._committed_generations().values(), default=NO_GENERATION))

    def _ends(self) -> list[dict[str, Any]]:
        """Worker exits that guardians have reported during the quorum check."""
        return [end for _, header, _ in self._deferred if header["op"] == "ended" for end in header["ends"]]

    def _let_go(self, permission: str) -> set[int]:
        """The workers that the old coordinator has let go: all, since it had finished the run, or those that were
        drained, of whose generation no other worker may have learnt that it was committed."""
        return _let_go(permission, self._ends())

    def _committed_generations(self) -> dict[int, int]:
        """The newest committed generation that each worker knows."""
        return {
            rank: connection.hello["membership_state"]["committed_generation"]
            for rank, connection in self._server.workers.items()
        }

    def _fetch_newest_record(self) -> GenerationRecord | None:
        """Returns the record of the newest committed generation, from the first worker that has it and answers."""
        generations, ended = self._committed_generations(), {end["rank"] for end in self._ends()}
        for rank in sorted(generations.keys() - ended, key=lambda rank: (-generations[rank], rank)):
            if generations[rank] == NO_GENERATION:
                return None
            self._asked_rank = rank
            self._server.send_to_workers([rank], {"op": "fetch_committed"})
            deadline = time.monotonic() + self._timeouts.failover_s
            while self._fetched is None and rank in self._server.workers and time.monotonic() < deadline:
                self._poll(QUORUM_TICK_S)
            if self._fetched is not None:
                return self._fetched
        return None


def _let_go(permission: str, ends: Iterable[dict[str, Any]]) -> set[int]:
    return {end["rank"] for end in ends if end["exit_code"] == 0 and end["permission"] == permission}
