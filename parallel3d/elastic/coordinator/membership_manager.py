"""Carries out what the membership protocol decides: sends its frames, evicts workers, publishes the recovery log.

The protocol (protocol/state_machine.py) is pure; here are its effects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.fences import Fences
from parallel3d.elastic.coordinator.kv_store import KeyValueStore
from parallel3d.elastic.coordinator.recovery_log import RecoveryLog
from parallel3d.elastic.coordinator.run_status import RunStatus, describe_error
from parallel3d.elastic.coordinator.shutdown import Shutdown
from parallel3d.elastic.coordinator.worker_joins import WorkerJoins
from parallel3d.elastic.frame_schemas import parse
from parallel3d.elastic.protocol.actions import (
    AbortGeneration,
    Action,
    ChangeRequest,
    Commit,
    DrainRefused,
    DrainRequest,
    FetchEntries,
    FinishRun,
    Propose,
    StopRun,
)
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo, check_quorum
from parallel3d.elastic.protocol.membership import GenerationRecord, LostWorker, StateReport
from parallel3d.elastic.protocol.record_delta import record_frame
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.errors import OutOfPlaceError, ProtocolError
from parallel3d.parallel.grid import Grid

OPS = ("report", "entries", "request_record", "confirm", "suspect", "finish_generation", "ready")
"""The workers' frames that are for the protocol."""


class MembershipManager:
    """Runs `protocol` for a run that began on `grid`. `own_info`: the guardian of its host's stub. `returns`: lost
    workers are started again, or spares wait."""

    def __init__(
        self,
        protocol: MembershipProtocol,
        grid: Grid,
        *,
        server: ConnectionServer,
        status: RunStatus,
        kv_store: KeyValueStore,
        shutdown: Shutdown,
        emit: Callable[[dict[str, Any]], None],
        flush: Callable[[], None],
        own_info: GuardianInfo | None,
        fences: Fences,
        build_s: float,
        returns: bool,
        join_wait_s: float,
    ):
        self.protocol = protocol
        self._join_wait_s = join_wait_s
        self._held_since_s: float | None = None
        """Since when workers wait for others to join with them."""
        self.joins = WorkerJoins(server, status, grid, build_s=build_s)
        self._fences = fences
        self.recovery_log = RecoveryLog(grid, returns=returns)
        self._server = server
        self._status = status
        self._kv_store = kv_store
        self._shutdown = shutdown
        self._emit, self._flush_records = emit, flush
        self._own_info = own_info
        self._proposal: Propose | None = None
        """The newest."""
        self._failover_plans: dict[Connection, FailoverPlan] = {}
        """The plan that each guardian has."""
        self._known_plans: tuple[FailoverPlan, FailoverPlan] | None = None
        """The newest plan, whole and in brief."""
        self._abort_generation_frame: dict[str, Any] | None = None
        """Of the newest change under way, for workers that connect late."""
        self._drain_requested: set[int] = set()
        """Workers that were sent a drain request."""
        self._drained_by_command: set[int] = set()
        """If the run turns out to need one of these, it stays."""
        self._successor: GuardianInfo | None = None
        """Its stub's coordinator takes over, once all workers wait between two steps."""
        self.moved_to = ""
        """The successor's host, once guardians have been sent there."""
        self._dismissed: set[int] = set()
        """Workers that the run does not need, perhaps before they have said hello."""

    def handle(self, rank: int, header: dict[str, Any], payload: bytes) -> None:
        """Handles a worker's frame, one of `OPS`. States that contradict each other are a defect and end the run.

        Raises OutOfPlaceError for a frame that only its sender is to blame for.
        """
        try:
            match header["op"]:
                case "report":
                    report = parse(StateReport.from_json, header["report"])
                    if report.rank != rank:
                        raise OutOfPlaceError(f"rank {rank} sent the report of rank {report.rank}")
                    self.recovery_log.record_report(rank, report.position)
                    self.execute(self.protocol.report(report))
                case "entries":
                    self.execute(self.protocol.entries(rank, header["generation"], payload))
                case "request_record":
                    self._send_whole_record(rank, header["generation"])
                case "confirm":
                    self.recovery_log.record_confirm(rank, header["moved_bytes"])
                    self.execute(self.protocol.confirm(rank, header["generation"], header["digest"]))
                case "suspect":
                    self.execute(self.protocol.suspect(rank, header["generation"], header["reason"]))
                case "finish_generation":
                    self.execute(self.protocol.finish(rank, header["generation"]))
                case "ready":
                    self.execute(self.joins.admit(rank, self.protocol))
        except OutOfPlaceError:
            raise
        except ProtocolError as error:
            self._status.record_error(rank, describe_error(error))
            self._shutdown.abort_after_failure()

    def send_current_state(self, connection: Connection) -> None:
        """Sends a late connection the frames that it has missed."""
        if connection.guarded_ranks:
            if self.protocol.committed:
                self._send_failover_plan(self.protocol.committed)
            return
        if self._abort_generation_frame:
            self._server.send(connection, self._abort_generation_frame)
        if connection.rank in self._drain_requested:
            self._server.send(connection, {"op": "drain_request"})

    def on_resumed(self, record: dict[str, Any]) -> None:
        """Handles the leader's record that the new generation trains."""
        self._emit_all(
            self.recovery_log.record_resumed(record["generation"], regroup_s=record["regroup_s"], plan=record["plan"])
        )

    def on_step(self, record: dict[str, Any]) -> None:
        """Handles the record of a completed step, after it was published."""
        self.protocol.last_reported_step = record["step"]
        self._emit_all(self.recovery_log.record_step(record.get("step_s", 0.0)))

    def evict(self, lost_workers: Sequence[LostWorker], *, detect_s: Sequence[float] = ()) -> None:
        """Removes lost workers; `detect_s` are the times from their last signs of life to the evidence."""
        if lost_workers:
            for lost_worker in lost_workers:
                if self.is_joining(lost_worker.rank) and not self.protocol.over:
                    text = f"{self._status.name(lost_worker.rank)} does not join: {lost_worker.why}"
                    self._emit({"kind": "notice", "text": text})
                self._status.record_survived_loss(lost_worker)
            self.execute(self.protocol.on_lost(lost_workers), detect_s=detect_s)

    def start_joiners(self, now_s: float) -> None:
        """Has workers started for what is missing, and ends those that take too long."""
        self._emit_all(self.joins.accept(self.protocol, now_s))
        self._fences.kill(self.joins.overdue(now_s))
        self._held_since_s = None if not self.protocol.holds_back else self._held_since_s or now_s
        if self._held_since_s is not None and now_s - self._held_since_s >= self._join_wait_s:
            self.execute(self.protocol.end_wait())

    def is_joining(self, rank: int) -> bool:
        return self.joins.is_joining(rank, self.protocol)

    def greet(self, rank: int, state: Mapping[str, Any] | None) -> None:
        """Handles a worker's hello, with what it knows of the run: one that was not asked for a part is a spare. One
        that an earlier coordinator has asked, and that comes too late for the quorum check, builds its part."""
        if rank in self._dismissed:
            self._dismiss([rank])
        elif not self.is_joining(rank):
            return
        elif state is not None and state["part"] is not None:
            if self.joins.resume(rank, (state["part"][0], state["part"][1]), time.monotonic()) and state["is_ready"]:
                self.execute(self.joins.admit(rank, self.protocol))
        elif self.joins.add_spare(rank):
            self._emit({"kind": "notice", "text": f"rank {rank} on {self._status.workers[rank].host} is a spare"})

    def announce_drain(self, rank: int) -> None:
        """Handles a worker that must leave; one that is not in the run yet needs no change of membership."""
        self._drained_by_command.discard(rank)
        if self._is_on_its_way(rank):
            self._dismiss([rank])
        else:
            self.execute(self.protocol.announce_drain(rank))

    def may_leave(self, ranks: Collection[int]) -> bool:
        """Whether these are workers of the run that don't leave yet."""
        return not self.protocol.over and self.protocol.stays(ranks)

    def drain(self, ranks: Collection[int], *, is_slow: bool = False) -> str:
        """Has workers leave that a command names, or that are slow; returns why that can't be, "" if it can."""
        members = [rank for rank in ranks if not self._is_on_its_way(rank)]
        survivability = self.protocol.check_drain(members)
        if not survivability.can_continue:
            return survivability.reason
        self._dismiss([rank for rank in ranks if rank not in members])
        self._drained_by_command.update(members)
        for rank in members if is_slow else ():
            self._tell_guardian(rank, {"op": "leaves_slow", "rank": rank, "leaves": True})
        self._server.send_to_workers(members, {"op": "drain_request", "by_command": True})
        self.execute(self.protocol.drain(members))
        return ""

    def drain_if_possible(self, ranks: Collection[int]) -> None:
        """Has workers leave that a command named to the coordinator before this one, or has them stay."""
        if reason := self.drain(ranks):
            for rank in sorted(ranks):
                self._keep(rank, reason)

    def _keep(self, rank: int, reason: str) -> None:
        """Lets a worker stay that a command named, since the run has come to need it."""
        self._drained_by_command.discard(rank)
        self._tell_guardian(rank, {"op": "leaves_slow", "rank": rank, "leaves": False})
        self._server.send_to_workers([rank], {"op": "drain_withdrawn"})
        text = f"{self._status.name(rank)} stays after all: without it, {reason}"
        self._emit({"kind": "notice", "text": text})

    def _tell_guardian(self, rank: int, frame: dict[str, Any]) -> None:
        """Sends a frame to the guardian of a worker."""
        self._server.send_to_all([each for each in self._server.guardians() if rank in each.guarded_ranks], frame)

    def _is_on_its_way(self, rank: int) -> bool:
        """Whether this worker is a spare, builds its part, or has not even said hello."""
        has_connected = bool(self._status.workers[rank].host)
        return self.joins.is_waiting(rank) or (self.is_joining(rank) and not has_connected)

    def _dismiss(self, ranks: Sequence[int]) -> None:
        """Lets workers go that the run does not need."""
        self._dismissed.update(ranks)
        self.joins.dismiss(ranks)
        self._finish(ranks, is_drained=True)

    def _finish(self, ranks: Sequence[int], *, is_drained: bool = False) -> None:
        """Lets workers end."""
        self._server.send_to_workers(ranks, {"op": "finish_run", "is_drained": is_drained})
        self._status.mark_done(ranks)

    def quorum_loss(self) -> str:
        """Why this coordinator must stop serving, or "". Half of the hosts are enough for one that already serves."""
        committed = self.protocol.committed
        if committed is None or self._own_info is None:  # no guardian could take over
            return ""
        hosts = {committed.hosts[rank] for rank in committed.members}
        reached = {self._own_info.host, *(connection.hello["host"] for connection in self._server.guardians())}
        return check_quorum(reached, hosts, lock_witness=lambda: "").reason

    def keep_empty(self, host: str) -> None:
        """Lets no worker come back on a host."""
        self.joins.withdraw(host)
        guardians = [each for each in self._server.guardians() if each.hello["host"] == host]
        self._server.send_to_all(guardians, {"op": "end_rejoins"})

    def hand_over(self, hosts: Collection[str]) -> bool:
        """Has a coordinator on one of these hosts take over between two steps; False if that can't be."""
        committed = self.protocol.committed
        if committed is None or self._own_info is None or self._successor is not None:
            return self._successor is not None
        plan = self._failover_plan(committed, self._own_info)
        guardians = (*plan.candidates, *plan.guardians)  # the next host's first, as after a loss
        self._successor = next((guardian for guardian in guardians if guardian.host in hosts), None)
        if self._successor is not None:
            self.execute(self.protocol.request_hand_over())
        return self._successor is not None

    def close(self) -> None:
        """Publishes what is left of the recovery log."""
        self._emit_all(self.recovery_log.close())

    def execute(self, actions: Iterable[Action], *, detect_s: Sequence[float] = ()) -> None:
        """Carries out the protocol's actions."""
        for action in actions:
            match action:
                case FetchEntries() | Propose() if self._successor is not None:
                    self._send_away(self._successor)
                    return
                case AbortGeneration():
                    self._abort_generation(action, detect_s)
                case FetchEntries():
                    frame = {"op": "fetch_entries", "generation": action.generation}
                    self._server.send_to_workers([action.rank], frame)
                case Propose():
                    self._propose(action)
                case Commit():
                    self._commit(action)
                case DrainRequest():
                    self._drain_requested.add(action.rank)
                    self._server.send_to_workers([action.rank], {"op": "drain_request"})
                case ChangeRequest():
                    frame = {"op": "change_request", "generation": action.generation}
                    self._server.send_to_workers([action.rank], frame)
                case DrainRefused() if action.rank in self._drained_by_command:
                    self._keep(action.rank, action.reason)
                case DrainRefused():
                    name = self._status.name(action.rank)
                    text = f"{name} should drain, but the run can't go on without it: {action.reason}"
                    self._emit({"kind": "notice", "text": text})
                    self._shutdown.stop_without([action.rank])
                case FinishRun():
                    self._flush_records()  # once they have ended, no worker can repeat a record to a new coordinator
                    self._finish([*action.ranks, *self.joins.take_spares()])
                    self._fences.kill(dict.fromkeys(building := self.joins.take_building(), "the run is over"))
                    self._status.mark_done(building)
                case StopRun():
                    self._status.record_stop_run(action.reason)
                    self._shutdown.abort_after_failure()

    def _abort_generation(self, action: AbortGeneration, detect_s: Sequence[float]) -> None:
        self._emit_all(self.recovery_log.begin(time.monotonic(), detect_s=detect_s))
        self._abort_generation_frame = {
            "op": "abort_generation",
            "generation": action.generation,
            "reason": action.reason,
        }
        self._server.send_to_workers(action.ranks, self._abort_generation_frame)

    def _propose(self, action: Propose) -> None:
        """Sends the record to its members, and before it the entries to those that lack them."""
        self._proposal, record = action, action.record
        frame = {"op": "entries", "generation": record.generation}
        self._server.send_to_workers(action.behind, frame, action.entries)
        self._server.send_to_workers(record.members, *record_frame(record, action.base))
        self.recovery_log.add_record(action.record, time.monotonic())

    def _send_whole_record(self, rank: int, generation: int) -> None:
        """Answers a worker that lacks the record from which the proposed one is the difference."""
        proposal = self._proposal
        if proposal is not None and proposal.record.generation == generation and rank in proposal.record.members:
            self._server.send_to_workers([rank], *record_frame(proposal.record, None))

    def _commit(self, action: Commit) -> None:
        self._server.send_to_workers(action.members, {"op": "commit", "generation": action.generation})
        self.recovery_log.record_commit(time.monotonic())
        self._status.mark_done(set(action.members) - self.protocol.live)
        self._abort_generation_frame = None
        assert self.protocol.committed is not None
        self._status.place(self.protocol.committed)
        self._send_failover_plan(self.protocol.committed)
        self._kv_store.drop_generations_before(action.generation)

    def _send_failover_plan(self, committed: GenerationRecord) -> None:
        """Sends guardians what they need if this process is lost: the whole plan to those whose stubs may take over,
        its brief form to the others. Those whose plan has not changed get nothing."""
        if self._own_info is not None:
            self._send_plan(self._failover_plan(committed, self._own_info))

    def _send_away(self, successor: GuardianInfo) -> None:
        """Sends guardians to the successor: all workers have reported, so none is within a step."""
        assert self.protocol.committed is not None
        plan = replace(self._failover_plan(self.protocol.committed, successor), is_move=True)
        self._emit({"kind": "notice", "text": f"the coordinator moves to {successor.host}"})
        self._send_plan(plan)
        self.moved_to = successor.host

    def _failover_plan(self, committed: GenerationRecord, coordinator: GuardianInfo) -> FailoverPlan:
        infos = [GuardianInfo.from_json(each.hello) for each in self._server.guardians()]
        return FailoverPlan(
            coordinator=coordinator,
            guardians=tuple(sorted(infos, key=lambda guardian: guardian.ranks)),
            hosts=tuple(sorted({committed.hosts[rank] for rank in committed.members})),
        )

    def _send_plan(self, whole: FailoverPlan) -> None:
        guardians: dict[Connection, tuple[int, ...]] = {}
        guardians |= {each: tuple(each.hello["ranks"]) for each in self._server.guardians()}
        if self._known_plans and self._known_plans[0] == whole:
            whole, brief = self._known_plans
        else:
            whole, brief = self._known_plans = whole, whole.brief()
        successors = {whole.coordinator.ranks, *(candidate.ranks for candidate in whole.candidates)}
        plans = {each: whole if ranks in successors else brief for each, ranks in guardians.items()}
        changed = [each for each, plan in plans.items() if self._failover_plans.get(each) is not plan]
        for plan in (whole, brief):
            if receivers := [each for each in changed if plans[each] is plan]:
                self._server.send_to_all(receivers, {"op": "failover_plan", "failover_plan": plan.to_json()})
        self._failover_plans = plans

    def _emit_all(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            self._emit(record)
