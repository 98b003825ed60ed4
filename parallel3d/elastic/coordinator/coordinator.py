"""The coordinator: the server of the control channel, which decides on membership and on the end of the run.

A process of its own (coordinator_process.py). One thread owns all state and waits in one selector, without locks;
records go to the reporter's own thread, so that a slow disk never delays an abort. The membership protocol (pure)
decides about losses; membership_manager.py carries that out.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.drain_manager import DrainManager
from parallel3d.elastic.coordinator.kv_store import OPS as KV_STORE_OPS
from parallel3d.elastic.coordinator.kv_store import KeyValueStore
from parallel3d.elastic.coordinator.membership_manager import OPS as MEMBERSHIP_OPS
from parallel3d.elastic.coordinator.membership_manager import MembershipManager
from parallel3d.elastic.coordinator.operator_requests import OperatorRequests
from parallel3d.elastic.coordinator.run_status import RunOutcome, RunStatus
from parallel3d.elastic.coordinator.shutdown import Shutdown
from parallel3d.elastic.coordinator.slow_step import HangReporter
from parallel3d.elastic.coordinator.stall_check import StallCheck
from parallel3d.elastic.coordinator.witness import OVER, Witness
from parallel3d.elastic.coordinator.worker_numbers import WorkerNumbers
from parallel3d.elastic.guardian.heartbeat import plan_heartbeat_timeouts
from parallel3d.elastic.protocol.failover import GuardianInfo
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.errors import EXIT_COORDINATOR_LOST, ProtocolError

TICK_S = 0.25
SHUTDOWN_S = 2.0


class Coordinator:
    """Serves until every worker has ended and every guardian has the run's exit code.

    Without `elastic` the first loss ends the run. The key-value store begins with `values`. `flush` writes all records.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        world_size: int,
        emit: Callable[[dict[str, Any]], None],
        flush: Callable[[], None] = lambda: None,
        timeouts: LaunchTimeouts,
        elastic: ElasticSettings | None = None,
        own_info: GuardianInfo | None = None,
        values: Mapping[str, bytes] | None = None,
        on_turn: Callable[[], None] = lambda: None,
        witness: Witness | None = None,
        numbers: WorkerNumbers | None = None,
    ):
        self._server = ConnectionServer(
            listener,
            secret=secret,
            control_s=timeouts.control_s,
            on_message=self._on_message,
            on_lost=self._on_disconnect,
        )
        self._kv_store = KeyValueStore(values or {}, send=self._server.send_to_all)
        self._emit_record, self._flush_records = emit, flush
        self._timeouts, self._elastic = timeouts, elastic
        self._own_info = own_info
        """The guardian of its host's stub, where it serves again if its process is lost."""
        self._status = RunStatus(world_size, elastic.grid if elastic else None, numbers)
        self._shutdown = Shutdown(self._server, self._status, emit=self._emit, abort_grace_s=timeouts.abort_grace_s)
        self._hang_reporter = HangReporter(
            elastic.slow_step if elastic else None, request_status=self._request_status, emit_notice=self._emit_notice
        )
        own_host = own_info.host if own_info else ""
        self._stall_check = StallCheck(self._server, self._status, timeouts=timeouts, own_host=own_host)
        self._drains = DrainManager(
            self._status, self._shutdown, self._stall_check.fences, emit=self._emit, own_host=own_host, elastic=elastic
        )
        self._requests = OperatorRequests(self._server, self._status, emit=self._emit, drains=self._drains)
        self._witness = witness or Witness(None)
        self._membership = self._make_membership()
        self._monitor_frame: dict[str, Any] | None = None  # the guardians' heartbeat timeouts, once known
        self._last_published: dict[str, int] = {}  # the newest step, by kind of record
        self._start_deadline = time.monotonic() + timeouts.start_s
        self._on_turn = on_turn

    def _make_membership(self) -> MembershipManager | None:
        """The manager of a run that begins; None: no loss is survived."""
        if (elastic := self._elastic) is None:
            return None
        return self._manage(MembershipProtocol(elastic.grid, **elastic.protocol_options))

    def _manage(self, protocol: MembershipProtocol) -> MembershipManager:
        assert self._elastic is not None
        return MembershipManager(
            protocol,
            self._elastic.grid,
            server=self._server,
            status=self._status,
            kv_store=self._kv_store,
            shutdown=self._shutdown,
            emit=self._emit,
            flush=lambda: self._flush_records(),
            own_info=self._own_info,
            fences=self._stall_check.fences,
            build_s=self._timeouts.start_s,
            join_wait_s=self._elastic.join_wait_s,
            returns=self._elastic.max_rejoins > 0 or len(self._status.workers) > len(self._elastic.grid.ranks),
        )

    # --- serving --------------------------------------------------------------------------------------------------

    def serve(self) -> RunOutcome:
        """Serves until the run is over; returns its outcome. Calls `on_turn` at least every 0.25 s."""
        try:
            self._begin()
            while not (self._status.over or self._moved_to):
                self._poll(self._drains.deadline_s - time.monotonic())
                self._check_start_deadline()
                self._stop_before_start()
                self._drains.turn(self._elastic_membership, self._live)
                self._check_slow_step()
                self._check_stalls()
                if rejected := self._server.rejections.report(time.monotonic(), is_last=self._status.over):
                    self._emit_notice(rejected)
            if self._membership:
                self._membership.close()
            if not self._moved_to:
                self._witness.mark(OVER)
                outcome = self._status.outcome()
                self._emit({"kind": "outcome", "exit_code": outcome.exit_code})
                self._flush_records()  # a guardian that has the code asks for no other coordinator
                self._shutdown.end_guardians(outcome, own_host=self._own_info.host if self._own_info else "")
            deadline = time.monotonic() + SHUTDOWN_S
            while self._peers_left() and time.monotonic() < deadline:
                self._poll(TICK_S)
        finally:  # also after a defect in here: a closed connection ends the run, an open one would hang it
            self._server.close()
        return RunOutcome(exit_code=0, moved_to=self._moved_to) if self._moved_to else self._status.outcome()

    @property
    def _moved_to(self) -> str:
        """The host whose coordinator goes on with the run; "" while this one does. Nothing is handled any more then."""
        return self._membership.moved_to if self._membership else ""

    def _peers_left(self) -> bool:
        """Whether some may still read what they were sent last. A successor does not wait for commands."""
        return bool(self._server.guardians() if self._moved_to else self._server.connections)

    def _poll(self, timeout_s: float) -> None:
        self._on_turn()
        self._server.poll(max(0.0, min(TICK_S, timeout_s)))

    def _begin(self) -> None:
        """Runs before the first poll; for subclasses."""

    def _check_start_deadline(self) -> None:
        if time.monotonic() > self._start_deadline:
            guarded = {rank for connection in self._server.guardians() for rank in connection.guarded_ranks}
            missing = sorted({*self._status.missing, *(self._live - guarded)})
            self._status.record_never_connected(missing, timeout_s=self._timeouts.start_s)
            self._start_deadline = float("inf")
            self._shutdown.abort_after_failure()

    def _stop_before_start(self) -> None:
        """Ends a run that is asked to stop while it waits for workers: the first step can't begin without them."""
        if self._status.stop_signal is not None and (missing := self._status.missing):
            self._status.mark_gone(missing)
            self._shutdown.stop(self._status.stop_signal, at_once=True)

    def _check_slow_step(self) -> None:
        now_s, last_step = time.monotonic(), self._status.last_step or 0
        if not self._shutdown.aborting and (why := self._hang_reporter.slow_step(last_step, now_s)):
            self._begin_hang_report(why)
        self._hang_reporter.publish_if_complete(now_s)

    def _check_stalls(self) -> None:
        protocol = self._elastic_membership.protocol if self._elastic_membership else None
        if why := self._stall_check.check(protocol, self._last_published, time.monotonic()):
            self._status.record_stop_run(why)
            self._shutdown.abort_after_failure()
        if protocol is not None and protocol.committed is not None:
            self._witness.mark(protocol.committed.generation)
        if self._elastic_membership and self._status.stop_signal is None:
            self._elastic_membership.start_joiners(time.monotonic())

    # --- messages -------------------------------------------------------------------------------------------------

    def _on_message(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        op = header["op"]
        if self._moved_to:
            pass
        elif connection.rank is not None:
            self._on_worker_message(connection, connection.rank, header, payload)
        elif op == "hello" and header["role"] == "operator":
            connection.hello = header
        elif op == "hello":
            self._learn_ranks(header)
            self._on_hello(connection, header)
        elif connection.role == "operator":
            self._requests.handle(connection, header, self._elastic_membership)
        elif connection.guarded_ranks:
            self._on_guardian_message(connection, op, header)
        else:
            raise ProtocolError(f"{op!r} before hello")

    def _on_hello(self, connection: Connection, header: dict[str, Any]) -> None:
        ranks, is_worker = tuple(header["ranks"]), header["role"] == "worker"
        if not ranks or (is_worker and len(ranks) > 1) or any(rank not in self._status.workers for rank in ranks):
            raise ProtocolError(f"hello from ranks {ranks}")
        if not is_worker:
            self._server.replace_guardian(connection, ranks)
            ranks += tuple(rank for rank in header.get("joined", ()) if rank in self._status.workers)
        gone = all(self._status.workers[rank].ended for rank in ranks)  # evicted before it found this coordinator
        if gone and is_worker:
            raise ProtocolError(f"hello from ranks {ranks}, which no longer take part")
        if is_worker:
            self._stall_check.fences.on_connected(ranks[0])
            self._server.add_worker(connection, ranks[0])
            self._status.record_hello(ranks[0], host=header["host"], log=header["log"])
            if self._membership:
                self._membership.greet(ranks[0], header.get("membership_state"))
        connection.hello = header
        if not is_worker:
            connection.guarded_ranks = ranks
            self._server.send(connection, {"op": "welcome"})
            if gone and header.get("num_workers", 1):
                self._shutdown.turn_away(connection)
                return
        self._send_current_state(connection)

    def _learn_ranks(self, hello: dict[str, Any]) -> None:
        """Takes notice of workers that this coordinator may not know; for subclasses."""

    def _send_current_state(self, connection: Connection) -> None:
        """Sends a late connection the frames that it has missed."""
        if self._membership:
            self._membership.send_current_state(connection)
        if self._monitor_frame and connection.guarded_ranks:
            self._server.send(connection, self._monitor_frame)
        for frame in self._shutdown.current_frames():
            self._server.send(connection, frame)

    def _on_guardian_message(self, connection: Connection, op: str, header: dict[str, Any]) -> None:
        match op:
            case "ended":
                self._on_worker_exits(connection.guarded_ranks, header["ends"])
                for end in header["ends"]:
                    self._server.end_worker(end["rank"])
            case "stop":
                self._shutdown.stop(header["signal"], at_once=header["at_once"])
            case "announce_drain":
                self._drains.announce(connection.guarded_ranks, by_guardian=True)
            case "announce_preemption":
                self._drains.announce_preemption(connection.hello["host"], header, self._elastic_membership)
            case "offer_worker" if self._membership:
                self._membership.joins.offer(connection, header["slot"])
            case "request_status":
                self._begin_hang_report("status of all ranks:")

    def _on_worker_message(self, connection: Connection, rank: int, header: dict[str, Any], payload: bytes) -> None:
        if self._status.workers[rank].ended and header["op"] != "finish":
            return  # evicted, but not yet at its end: what it does and how it fails is no longer the run's
        match header["op"]:
            case op if op in MEMBERSHIP_OPS and self._membership:
                self._membership.handle(rank, header, payload)
            case "publish":
                self._on_record(rank, header["record"])
            case op if op in KV_STORE_OPS:
                self._kv_store.handle(connection, header, payload)
            case "error" if self._membership and self._membership.is_joining(rank):
                self._emit_notice(f"{self._status.name(rank)} fails: {header['error']['text']}")
            case "error":
                self._status.record_error(rank, header["error"])
                self._shutdown.abort_after_failure()
            case "announce_drain":
                self._drains.announce([rank], by_command=header.get("by_command", False))
            case "finish":
                self._stall_check.fences.on_finish(rank)
                self._server.send(connection, {"op": "finish_ack"})
            case "probed":
                self._stall_check.paths.add(rank, header["round"], header["unreachable"])
            case "worker_status":
                self._hang_reporter.add_status(rank, header["status"])
                self._stall_check.change_deadline.add_status(rank, header["status"])
            case _ if self._shutdown.aborting:
                return
            case op:
                raise ProtocolError(f"rank {rank} sent {op!r}")

    def _on_record(self, rank: int, record: dict[str, Any]) -> None:
        """Passes a worker's record to the reporter. A new leader repeats steps that the old one may have published."""
        self._hang_reporter.add_record(record, time.monotonic())
        match record:
            case {"kind": "step" | "evaluation" as kind, "step": int(step)}:
                if step <= self._last_published.get(kind, -1):
                    return
                self._last_published[kind] = step
            case {"kind": "round_trip", "seconds": seconds}:
                self._set_heartbeat_timeouts(seconds)
                return
            case {"kind": "resumed"} if self._membership:
                self._membership.on_resumed(record)
                return
            case {"kind": "drain_slow"}:
                self._drains.drain_slow(record, self._elastic_membership)
                return
        self._status.add_record(rank, record)
        self._emit(record)
        if self._membership and record.get("kind") == "step":
            self._membership.on_step(record)

    # --- losses ---------------------------------------------------------------------------------------------------

    def _on_worker_exits(self, guarded_ranks: Collection[int], ends: Sequence[dict[str, Any]]) -> None:
        """Handles a guardian's report of workers that have exited."""
        if any(end["rank"] not in guarded_ranks for end in ends):
            raise ProtocolError(f"the guardian of ranks {guarded_ranks} reports {[end['rank'] for end in ends]}")
        lost_workers, detect_s, reasons = [], [], self._stall_check.fences.reasons
        for end in ends:
            rank, exit_code, by_guardian = end["rank"], end["exit_code"], end["by_guardian"]
            if self._status.workers[rank].ended:  # guardians repeat their reports to a new coordinator
                continue
            self._status.record_step(rank, end["step"])
            is_lost = exit_code < 0 or exit_code == EXIT_COORDINATOR_LOST
            is_joining = self._membership is not None and self._membership.is_joining(rank)
            stays_out = is_joining and (exit_code != 0 or self._status.is_needed(rank))
            if (is_lost or stays_out) and not by_guardian and self._elastic_membership:
                why = "" if exit_code < 0 else reasons.get(rank, f"ended with exit code {exit_code}")
                lost_workers.append(self._status.lost_by_signal(rank, -exit_code, because=end["why"] or why))
                detect_s += [] if end["detect_s"] is None else [end["detect_s"]]
            elif exit_code == 0 and self._elastic_membership and self._status.is_needed(rank):
                self._status.record_early_exit(rank)
            else:
                self._status.record_exit(rank, exit_code=exit_code, by_guardian=by_guardian)
        if self._membership:
            self._membership.evict(lost_workers, detect_s=detect_s)
        self._shutdown.abort_after_failure()

    def _on_disconnect(self, connection: Connection) -> None:
        """Handles a lost connection. A lost guardian takes its workers along; a worker's end its guardian reports."""
        if connection.rank is not None:
            self._stall_check.fences.on_connection_lost(connection.rank, connection.lost_because, time.monotonic())
        lost_workers = [
            self._status.lost_with_guardian(rank)
            for rank in connection.guarded_ranks
            if not self._status.workers[rank].ended
        ]
        if (membership := self._elastic_membership) and not self._moved_to:
            if lost_workers and (reason := membership.quorum_loss()):
                self._status.record_lost_quorum(reason)
            membership.evict(lost_workers)
        elif not self._moved_to:
            for lost_worker in lost_workers:
                self._status.record_fatal_loss(lost_worker)
        self._shutdown.abort_after_failure()

    @property
    def _elastic_membership(self) -> MembershipManager | None:
        """The membership manager while a loss may be survived."""
        return None if self._shutdown.aborting else self._membership

    @property
    def _live(self) -> frozenset[int]:
        if self._membership:
            return self._membership.protocol.live
        return frozenset(rank for rank, worker in self._status.workers.items() if not worker.ended)

    # --- guardians' settings, hang reports, records ---------------------------------------------------------------

    def _set_heartbeat_timeouts(self, round_trip_s: float) -> None:
        """Derives the guardians' timeouts from the measured round trip, once."""
        if (elastic := self._elastic) and not self._monitor_frame:
            timeouts = plan_heartbeat_timeouts(elastic.heartbeat_timeout, elastic.watchdog_timeout, round_trip_s)
            self._monitor_frame = {"op": "monitor", **asdict(timeouts)}
            self._server.send_to_guardians(self._monitor_frame)
            self._emit_notice(
                f"timeouts: heartbeat {timeouts.heartbeat_timeout_s:.2f} s, "
                f"watchdog {timeouts.watchdog_timeout_s:.0f} s (round trip {round_trip_s * 1e3:.2f} ms)"
            )

    def _begin_hang_report(self, why: str) -> None:
        workers = self._status.workers
        self._hang_reporter.begin(why, {rank: workers[rank].coordinates for rank in self._live}, time.monotonic())

    def _request_status(self, ranks: Collection[int]) -> None:
        """Asks workers for their status; their guardians make them write their stacks to their logs."""
        self._server.send_to_workers(ranks, {"op": "request_status"})
        self._server.send_to_guardians({"op": "request_status"})

    def _emit(self, record: dict[str, Any]) -> None:
        self._emit_record(record)

    def _emit_notice(self, text: str) -> None:
        self._emit({"kind": "notice", "text": text})
