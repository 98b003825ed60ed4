"""The coordinator: the server of the control channel, which decides who takes part, and when and how the run is over.

It is a thread of the launcher's process (of rank 0's guardian under torchrun), never of a worker. One thread owns all
its state and waits in one selector, so there are no locks; records go on to the report's own thread, so that a slow
disk never delays an abort. What to do about losses is decided by the protocol (pure), carried out here.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel3d.config.schema import TimeoutConfig
from parallel3d.elastic.coordinator.connections import Connection, ConnectionServer
from parallel3d.elastic.coordinator.kv_store import OPS as KV_STORE_OPS
from parallel3d.elastic.coordinator.kv_store import KeyValueStore
from parallel3d.elastic.coordinator.recovery_log import RecoveryLog
from parallel3d.elastic.coordinator.run_status import RunOutcome, RunStatus, describe_error
from parallel3d.elastic.coordinator.slow_step import HangReport, SlowStepRule, StepTimeBaseline
from parallel3d.elastic.guardian.heartbeat import plan_heartbeat_timeouts
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo, check_quorum
from parallel3d.elastic.protocol.membership import GenerationRecord, LostWorker, StateReport
from parallel3d.elastic.protocol.state_machine import (
    AbortGeneration,
    Action,
    Commit,
    DrainRefused,
    DrainRequest,
    FinishRun,
    MembershipProtocol,
    Propose,
    StopRun,
)
from parallel3d.elastic.worker.control_channel import encode_frame
from parallel3d.errors import EXIT_COORDINATOR_LOST, LaunchError, ProtocolError
from parallel3d.parallel.grid import Grid

TICK_S = 0.25
SHUTDOWN_S = 2.0
GATHER_DRAINS_S = 0.25


@dataclass(frozen=True, kw_only=True)
class LaunchTimeouts:
    """How long each wait of the launching side may last, in seconds."""

    start_s: float = 600.0
    """From the coordinator's start until every worker has connected; also the longest look-up of its address."""
    connect_s: float = 60.0
    """Until the coordinator accepts a connection."""
    failover_s: float = 5.0
    """From the loss of the coordinator until its successor must have been reached by all that shall go on."""
    abort_grace_s: float = 3.0
    """From the end of the run to SIGKILL for workers that have not left."""
    stop_grace_s: float = 15.0
    """From a stop asked for (Ctrl-C, SIGTERM) to SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """What the launching side must know of a run that can go on without some of its workers."""

    grid: Grid
    """Who computes at the start."""
    zero_stage: int
    zero_backups: int
    enabled: bool = True
    heartbeat_timeout: TimeoutConfig
    watchdog_timeout: TimeoutConfig
    witness: str | None = None
    slow_step: SlowStepRule | None = None
    """When a step is worth asking about; None: never."""


def open_listener(host: str, port: int) -> socket.socket:
    """The coordinator's socket; port 0 takes a free one. Raises LaunchError when the port is taken."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise LaunchError(
            f"can't listen at port {port} ({error}): choose another one (--master_port of your launcher)"
        ) from None


class Coordinator:
    """Serves until every worker has ended and every guardian knows how the run has.

    Without `elastic` the first loss ends it. `values` are on the board for its workers from the start.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        world_size: int,
        emit: Callable[[dict[str, Any]], None],
        timeouts: LaunchTimeouts,
        elastic: ElasticSettings | None = None,
        own_info: GuardianInfo | None = None,
        values: Mapping[str, bytes] | None = None,
    ):
        self._server = ConnectionServer(listener, on_message=self._on_message, on_lost=self._on_disconnect)
        self._kv_store = KeyValueStore(values or {}, send=self._server.send)
        self._emit = emit
        self._timeouts = timeouts
        self._elastic = elastic
        self._own_info = own_info
        """The guardian in whose process it is."""
        self._status = RunStatus(world_size)
        self._protocol: MembershipProtocol | None = None
        if elastic:
            self._status.record_grid(elastic.grid)
            self._protocol = self._make_protocol(elastic)
            self._recovery_log = RecoveryLog(elastic.grid)
        self._abort_generation_frame: dict[str, Any] | None = None
        """Of the newest change under way, for workers that connect late."""
        self._drain_requested: set[int] = set()
        """Workers that have been told to ask for the change with which they leave."""
        self._monitor_frame: dict[str, Any] | None = None
        """The guardians' patience, once it is known."""
        self._aborting = False
        self._last_reported: dict[str, int] = {}
        """By kind of record, the newest step told."""
        self._draining: set[int] = set()
        """Workers that are to leave, while others may be named."""
        self._drain_deadline = float("inf")
        self._baseline = StepTimeBaseline(elastic.slow_step) if elastic and elastic.slow_step else None
        self._hang_report: HangReport | None = None
        """Under way."""
        self._start_deadline = time.monotonic() + timeouts.start_s
        self._thread = threading.Thread(target=self._serve, name="coordinator", daemon=True)

    def start(self) -> None:
        """Starts to serve; call it after the forks, since a thread does not survive one."""
        self._thread.start()

    def join(self, timeout_s: float) -> RunOutcome:
        """The outcome, once the run is over; what is known of it when that takes longer than `timeout_s`."""
        self._thread.join(timeout_s)
        return self._status.outcome()

    def _make_protocol(self, elastic: ElasticSettings) -> MembershipProtocol | None:
        return MembershipProtocol(
            elastic.grid, zero_stage=elastic.zero_stage, zero_backups=elastic.zero_backups, enabled=elastic.enabled
        )

    def _serve(self) -> None:
        try:
            self._begin()
            while not self._status.over:
                self._server.poll(max(0.0, min(TICK_S, self._drain_deadline - time.monotonic())))
                self._check_start_deadline()
                self._process_drains()
                self._check_slow_step()
            if self._protocol:
                self._emit_all(self._recovery_log.close())
            self._send_to_guardians({"op": "over", "exit_code": self._status.outcome().exit_code})
            deadline = time.monotonic() + SHUTDOWN_S
            while self._server.connections and time.monotonic() < deadline:
                self._server.poll(TICK_S)
        finally:  # also after a defect in here: a closed connection ends the run, an open one would hang it
            self._server.close()

    def _begin(self) -> None:
        """What comes before the first turn."""

    def _check_start_deadline(self) -> None:
        if time.monotonic() > self._start_deadline:
            missing = [rank for rank, worker in self._status.workers.items() if not (worker.host or worker.ended)]
            self._status.record_never_connected(missing, timeout_s=self._timeouts.start_s)
            self._start_deadline = float("inf")
            self._abort_after_failure()

    # What they say

    def _on_message(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        op = header["op"]
        if op == "hello":
            self._on_hello(connection, header)
        elif connection.guarded_ranks:
            self._on_guardian_message(connection, op, header)
        elif connection.rank is not None:
            self._on_worker_message(connection, connection.rank, header, payload)
        else:
            raise ProtocolError(f"{op!r} before hello")

    def _on_hello(self, connection: Connection, header: dict[str, Any]) -> None:
        ranks = tuple(header["ranks"])
        if not ranks or any(rank not in self._status.workers for rank in ranks):
            raise ProtocolError(f"hello from ranks {ranks}")
        gone = all(self._status.workers[rank].ended for rank in ranks)  # evicted before it found this coordinator
        if gone and header["role"] == "worker":
            raise ProtocolError(f"hello from ranks {ranks}, which take part no longer")
        connection.hello = header
        if header["role"] == "guardian":
            connection.guarded_ranks = ranks
            self._server.send(connection, {"op": "welcome"})
            if gone:
                self._server.send(connection, {"op": "over", "exit_code": EXIT_COORDINATOR_LOST})
                return
        else:
            (connection.rank,) = ranks
            self._status.record_hello(connection.rank, host=header["host"], log=header["log"])
        self._send_current_state(connection)

    def _send_current_state(self, connection: Connection) -> None:
        """Whoever comes late learns what the others have been told."""
        if self._status.stop_signal is not None:
            self._server.send(connection, {"op": "stop"})
        if self._abort_generation_frame and connection.rank is not None:
            self._server.send(connection, self._abort_generation_frame)
        if connection.rank in self._drain_requested:
            self._server.send(connection, {"op": "drain_request"})
        if self._monitor_frame and connection.guarded_ranks:
            self._server.send(connection, self._monitor_frame)
        if self._protocol and self._protocol.committed and connection.guarded_ranks:
            self._send_failover_plan(self._protocol.committed)
        if self._aborting:
            self._server.send(connection, self._abort_frame(self._timeouts.abort_grace_s))

    def _on_guardian_message(self, connection: Connection, op: str, header: dict[str, Any]) -> None:
        if op == "ended":
            self._on_worker_exits(header["ends"])
        elif op == "stop":
            self._stop(header["signal"], at_once=header["at_once"])
        elif op == "announce_drain":
            self._on_drain_announced(connection.guarded_ranks)
        elif op == "request_status":
            self._begin_hang_report("where everybody is:")

    def _on_worker_message(self, connection: Connection, rank: int, header: dict[str, Any], payload: bytes) -> None:
        match header["op"]:
            case "publish":
                self._publish(rank, header["record"])
            case op if op in KV_STORE_OPS:
                self._kv_store.handle(connection, header, payload)
            case "error":
                self._status.record_error(rank, header["error"])
                self._abort_after_failure()
            case "announce_drain":
                self._on_drain_announced([rank])
            case "finish":
                self._server.send(connection, {"op": "finish_ack"})
            case "worker_status":
                if self._hang_report:
                    self._hang_report.add(rank, header["status"])
            case "report" | "confirm" | "suspect" | "finish_generation" if self._protocol:
                self._on_membership_message(self._protocol, rank, header)
            case _ if self._aborting:
                return
            case op:
                raise ProtocolError(f"rank {rank} sent {op!r}")

    def _on_membership_message(self, protocol: MembershipProtocol, rank: int, header: dict[str, Any]) -> None:
        """A worker's word on membership. One that can't be is a defect: it ends the run."""
        try:
            match header["op"]:
                case "report":
                    report = StateReport.from_json(header["report"])
                    self._recovery_log.record_report(rank, report.position)
                    self._execute(protocol.report(report))
                case "confirm":
                    self._recovery_log.record_confirm(rank, header["moved_bytes"])
                    self._execute(protocol.confirm(rank, header["generation"], header["digest"]))
                case "suspect":
                    self._execute(protocol.suspect(rank, header["generation"], header["reason"]))
                case "finish_generation":
                    self._execute(protocol.finish(rank, header["generation"]))
        except ProtocolError as error:
            self._status.record_error(rank, describe_error(error))
            self._abort_after_failure()

    def _publish(self, rank: int, record: dict[str, Any]) -> None:
        """Passes a record on to the report. A new leader repeats what the old one may not have told."""
        if self._baseline:
            self._baseline.add(record, time.monotonic())
        match record:
            case {"kind": "step" | "evaluation" as kind, "step": int(step)}:
                if step <= self._last_reported.get(kind, -1):
                    return
                self._last_reported[kind] = step
            case {"kind": "round_trip", "seconds": seconds}:
                self._set_heartbeat_timeouts(seconds)
                return
            case {"kind": "resumed", "generation": generation, "regroup_s": regroup_s, "plan": plan}:
                self._emit_all(self._recovery_log.record_resumed(generation, regroup_s=regroup_s, plan=plan))
                return
        self._status.add_record(rank, record)
        self._emit(record)
        if self._protocol and record.get("kind") == "step":
            self._protocol.last_reported_step = record["step"]
            self._emit_all(self._recovery_log.record_step(record.get("step_s", 0.0)))

    # Where everybody is

    def _check_slow_step(self) -> None:
        now_s = time.monotonic()
        slow_step_s = self._baseline.slow_step_s(now_s) if self._baseline and not self._aborting else None
        if self._baseline and slow_step_s is not None:
            last_step = self._status.last_step or 0
            what = f"the evaluation after step {last_step}" if self._baseline.evaluates else f"step {last_step + 1}"
            self._begin_hang_report(f"{what} is overdue: nothing has come for {slow_step_s:.1f} s (stacks: logs/)")
        if self._hang_report and self._hang_report.is_over(now_s):
            self._emit_notice(self._hang_report.format())
            self._hang_report = None

    def _begin_hang_report(self, why: str) -> None:
        """Asks every worker where it is; their guardians make them write their stacks into their logs."""
        coordinates = {rank: worker.coordinates for rank, worker in self._status.workers.items()}
        self._hang_report = HangReport(why, sorted(self._live), coordinates, time.monotonic())
        self._send_to_workers(self._live, {"op": "request_status"})
        self._send_to_guardians({"op": "request_status"})

    # Who takes part

    def _on_worker_exits(self, ends: Iterable[dict[str, Any]]) -> None:
        """What waitpid has told a guardian, of one or more workers."""
        lost_workers, detect_s = [], []
        for end in ends:
            rank, exit_code, by_guardian = end["rank"], end["exit_code"], end["by_guardian"]
            if self._status.workers[rank].ended:  # a guardian tells a new coordinator what it has told the old one
                continue
            self._status.record_step(rank, end["step"])
            if exit_code < 0 and not by_guardian and self._is_elastic:
                lost_workers.append(self._status.lost_by_signal(rank, -exit_code, because=end["why"]))
                detect_s += [] if end["detect_s"] is None else [end["detect_s"]]
            elif exit_code == 0 and self._is_elastic and self._status.is_needed(rank):
                self._status.record_early_exit(rank)
            else:
                self._status.record_exit(rank, exit_code=exit_code, by_guardian=by_guardian)
        self._evict(lost_workers, detect_s=detect_s)
        self._abort_after_failure()

    def _on_disconnect(self, connection: Connection) -> None:
        """A connection broke: a guardian takes its workers along, a worker's own end is told by its guardian."""
        lost_workers = [
            self._status.lost_with_guardian(rank)
            for rank in connection.guarded_ranks
            if not self._status.workers[rank].ended
        ]
        if lost_workers and self._is_elastic and (reason := self._lacks_quorum()):
            self._status.record_lost_quorum(reason)
        if self._is_elastic:
            self._evict(lost_workers)
        else:
            for lost_worker in lost_workers:
                self._status.record_fatal_loss(lost_worker)
        self._abort_after_failure()

    def _lacks_quorum(self) -> str:
        """Why this coordinator may serve no longer; "" when it may. Half of the hosts will do for the one in office."""
        committed = self._protocol.committed if self._protocol else None
        if committed is None or self._own_info is None:  # nobody can take over
            return ""
        hosts = {committed.hosts[rank] for rank in committed.members}
        reached = {connection.hello["host"] for connection in self._server.guardians()}
        return check_quorum(reached, hosts, lock_witness=lambda: "").reason

    @property
    def _is_elastic(self) -> bool:
        """The protocol has a say in what follows from a loss."""
        return self._protocol is not None and not self._aborting

    def _evict(self, lost_workers: Sequence[LostWorker], *, detect_s: Sequence[float] = ()) -> None:
        if lost_workers and self._protocol:
            for lost_worker in lost_workers:
                self._status.record_survived_loss(lost_worker)
            self._execute(self._protocol.on_lost(lost_workers), detect_s=detect_s)

    def _execute(self, actions: Iterable[Action], *, detect_s: Sequence[float] = ()) -> None:
        """Carries out what the protocol has decided."""
        for action in actions:
            match action:
                case AbortGeneration():
                    self._emit_all(self._recovery_log.begin(time.monotonic(), detect_s=detect_s))
                    self._abort_generation_frame = {
                        "op": "abort_generation",
                        "generation": action.generation,
                        "reason": action.reason,
                    }
                    self._send_to_workers(action.ranks, self._abort_generation_frame)
                case Propose():
                    self._send_to_workers(action.record.members, {"op": "record", "record": action.record.to_json()})
                    self._recovery_log.add_record(action.record, time.monotonic())
                case Commit():
                    self._send_to_workers(action.members, {"op": "commit", "generation": action.generation})
                    self._recovery_log.record_commit(time.monotonic())
                    self._status.mark_done(set(action.members) - self._live)
                    self._abort_generation_frame = None
                    assert self._protocol is not None and self._protocol.committed is not None
                    self._send_failover_plan(self._protocol.committed)
                    self._kv_store.drop_generations_before(action.generation)
                case DrainRequest():
                    self._drain_requested.add(action.rank)
                    self._send_to_workers([action.rank], {"op": "drain_request"})
                case DrainRefused():
                    name = self._status.name(action.rank)
                    self._emit_notice(f"{name} is to leave, but the run can't go on without it: {action.reason}")
                    self._stop(signal.SIGTERM, at_once=False)
                case FinishRun():
                    self._send_to_workers(action.ranks, {"op": "finish_run"})
                    self._status.mark_done(action.ranks)
                case StopRun():
                    self._status.record_stop_run(action.reason)
                    self._abort_after_failure()

    def _on_drain_announced(self, ranks: Iterable[int]) -> None:
        """Workers that have to go soon. A host tells all of its own within moments: decide on them together."""
        if not self._draining:
            self._drain_deadline = time.monotonic() + GATHER_DRAINS_S
        self._draining.update(ranks)

    def _process_drains(self) -> None:
        """Lets go those that are to leave; stops the run when the rest could not go on, or when that is nobody."""
        everybody = self._draining >= self._live
        if not self._draining or not (everybody or time.monotonic() >= self._drain_deadline):
            return
        draining, self._draining, self._drain_deadline = self._draining, set(), float("inf")
        if everybody or self._protocol is None:
            self._stop(signal.SIGTERM, at_once=False)
            return
        for rank in sorted(draining):
            self._execute(self._protocol.announce_drain(rank))

    @property
    def _live(self) -> frozenset[int]:
        if self._protocol:
            return self._protocol.live
        return frozenset(rank for rank, worker in self._status.workers.items() if not worker.ended)

    def _set_heartbeat_timeouts(self, round_trip_s: float) -> None:
        if self._elastic and not self._monitor_frame:
            heartbeat_timeouts = plan_heartbeat_timeouts(
                self._elastic.heartbeat_timeout, self._elastic.watchdog_timeout, round_trip_s
            )
            self._monitor_frame = {
                "op": "monitor",
                "heartbeat_timeout_s": heartbeat_timeouts.heartbeat_timeout_s,
                "watchdog_timeout_s": heartbeat_timeouts.watchdog_timeout_s,
            }
            self._send_to_guardians(self._monitor_frame)
            self._emit_notice(
                f"timeouts: heartbeat {heartbeat_timeouts.heartbeat_timeout_s:.2f} s, "
                f"watchdog {heartbeat_timeouts.watchdog_timeout_s:.0f} s (round trip {round_trip_s * 1e3:.2f} ms)"
            )

    # How the run ends

    def _stop(self, signal_number: int, *, at_once: bool) -> None:
        if self._status.stop_signal is None and not self._aborting:
            self._status.record_stop_signal(signal_number)
            self._emit_notice("stopping after this step; press Ctrl-C again to stop at once")
            self._broadcast({"op": "stop"})
        if at_once:
            self._aborting = True
            self._broadcast(self._abort_frame(0.0))

    def _abort_after_failure(self) -> None:
        """What the run can't survive ends it: everybody is told, once."""
        if self._status.failures and not self._aborting:
            self._aborting = True
            self._emit({"event": "failure", "text": self._status.failures[0].message})
            self._broadcast(self._abort_frame(self._timeouts.abort_grace_s))

    def _abort_frame(self, grace_s: float) -> dict[str, Any]:
        reason = self._status.failures[0].message if self._status.failures else "stopped at once"
        return {"op": "abort", "reason": reason, "grace_s": grace_s}

    # Telling

    def _send_to_workers(self, ranks: Iterable[int], header: dict[str, Any]) -> None:
        frame, workers = encode_frame(header), self._server.workers()
        for rank in ranks:
            if rank in workers:
                self._server.send_encoded(workers[rank], frame)

    def _broadcast(self, header: dict[str, Any]) -> None:
        for connection in list(self._server.connections):
            if connection.guarded_ranks or connection.rank is not None:
                self._server.send(connection, header)

    def _send_to_guardians(self, header: dict[str, Any]) -> None:
        for connection in self._server.guardians():
            self._server.send(connection, header)

    def _send_failover_plan(self, committed: GenerationRecord) -> None:
        """Tells all guardians whom to turn to if this process is lost."""
        if self._own_info is None:
            return
        guardians = [GuardianInfo.from_json(connection.hello) for connection in self._server.guardians()]
        failover_plan = FailoverPlan(
            coordinator=self._own_info,
            guardians=tuple(sorted(guardians, key=lambda guardian: guardian.ranks)),
            hosts=tuple(sorted({committed.hosts[rank] for rank in committed.members})),
        )
        self._send_to_guardians({"op": "failover_plan", "failover_plan": failover_plan.to_json()})

    def _emit_notice(self, text: str) -> None:
        self._emit({"kind": "notice", "text": text})

    def _emit_all(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            self._emit(record)
