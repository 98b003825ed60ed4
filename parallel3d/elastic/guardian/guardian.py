"""The guardian: the parent process of workers, which outlives them.

It detects a death within milliseconds (SIGCHLD, waitpid) and reports it to the coordinator, kills a worker that gives
no sign of life before it reports it (so that none wakes up in a generation that is over), forwards stop signals, kills
workers that do not exit in time, and stays until the coordinator has the run's exit code. The stub's exit code is that
one, so that a launcher above it never takes a lost worker for success.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from parallel3d.elastic.child_processes import ParentLink
from parallel3d.elastic.coordinator.run_status import EXIT_BY_SIGNAL, signal_name
from parallel3d.elastic.frames import (
    CHUNK_BYTES,
    PING_S,
    FrameReader,
    NotServingError,
    connect,
    encode_frame,
    max_silent_pings,
    open_connection,
)
from parallel3d.elastic.guardian.discovery import CoordinatorDiscovery
from parallel3d.elastic.guardian.heartbeat import CHECK_INTERVAL_S, HeartbeatMonitor, HeartbeatTimeouts
from parallel3d.elastic.guardian.signals import STACK_DUMP_SIGNAL, Signals
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.errors import EXIT_COORDINATOR_LOST, EXIT_WORKER_LOST, LaunchError, ProtocolError

TICK_S = 0.5
CANDIDATE_CONNECT_S = 1.0


class Guardian:
    """Guards `children` (pid -> rank), the workers that this process has forked; `own_info` describes it to others.

    `lost_ranks`: the workers of the guardian before this one, which died with it.
    """

    def __init__(
        self,
        children: Mapping[int, int],
        *,
        monitor: HeartbeatMonitor,
        discovery: CoordinatorDiscovery,
        signals: Signals,
        timeouts: LaunchTimeouts,
        own_info: GuardianInfo,
        link: ParentLink,
        lost_ranks: Sequence[int] = (),
    ):
        self._children = dict(children)
        self._monitor = monitor
        self._declared_dead: dict[int, str] = {}
        """Unresponsive workers that it has killed: pid -> reason."""
        self._own_info = own_info
        self._stub = link
        self._failover_plan: FailoverPlan | None = None
        self._candidates: list[GuardianInfo] | None = None
        """Failover candidates not tried yet; None while there is a coordinator."""
        self._candidate: GuardianInfo | None = None
        """The one being tried."""
        self._welcome_deadline = float("inf")
        self._timeouts = timeouts
        self._signals = signals
        self._stops_seen = 0
        self._status_requests_seen = 0
        self._request: dict[str, Any] | None = None
        """The frame of the newest stop signal."""
        self._deadline = float("inf")
        self._enforced: set[int] = set()
        self._link: socket.socket | None = None
        self._reader = FrameReader()
        self._next_ping_s = 0.0
        self._silent_pings = 0
        """Pings sent since the coordinator's last frame."""
        self._exit_code: int | None = None
        """The run's, once the coordinator has sent it or is lost."""
        self._ends = [_lost_with_guardian(rank) for rank in lost_ranks]
        """Exits of its workers, repeated to every new coordinator."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wakeup, selectors.EVENT_READ, signals.drain)
        self._discovery = discovery
        self._selector.register(link.connection, selectors.EVENT_READ, self._on_stub_message)
        self._is_discovering = discovery.known_address is None
        if discovery.known_address:
            self._connect_first(discovery.known_address)
        else:
            self._selector.register(discovery.pipe, selectors.EVENT_READ, self._on_address_found)

    def monitor(self) -> int:
        """Guards the workers until the run is over; returns its exit code."""
        try:
            while self._children or self._is_discovering or self._exit_code is None:
                self._reap()
                self._handle_stop_signals()
                self._forward_status_requests()
                self._kill_unresponsive()
                self._enforce_deadline()
                self._try_candidate()
                self._stub.beat()
                for key, _ in self._selector.select(CHECK_INTERVAL_S if self._monitor.active else TICK_S):
                    key.data()
                self._ping()
            return self._exit_code
        finally:
            self._kill_all(enforced=False)
            if self._link is not None:
                self._link.close()
            self._selector.close()

    # --- the stub -------------------------------------------------------------------------------------------------

    def _on_stub_message(self) -> None:
        for message in self._stub.receive():
            self._signals.add(message["number"])

    # --- connection to the coordinator ----------------------------------------------------------------------------

    def _on_address_found(self) -> None:
        address = self._discovery.read_address()
        self._selector.unregister(self._discovery.pipe)
        self._is_discovering = False
        if address:
            self._connect_first(address)

    def _connect_first(self, address: Address) -> None:
        self._stub.pause()
        try:
            self._use(
                open_connection(
                    address,
                    self._hello(),
                    get_secret=self._discovery.run_secret.read,
                    timeout_s=self._timeouts.connect_s,
                )
            )
            self._report_address(address)
        except LaunchError as error:
            self._end_without_coordinator(str(error))

    def _hello(self) -> dict[str, Any]:
        return {"op": "hello", "role": "guardian", **self._own_info.to_json(), "num_workers": len(self._children)}

    def _report_address(self, address: Address) -> None:
        """Sends the stub what a guardian in this one's place would have to know."""
        secret = self._discovery.run_secret.read().hex()
        self._stub.send({"op": "located", "address": list(address), "secret": secret})

    def _use(self, link: socket.socket) -> None:
        self._link = link
        self._reader, self._silent_pings = FrameReader(), 0
        self._selector.register(self._link, selectors.EVENT_READ, self._receive)
        if self._ends:
            self._send({"op": "ended", "ends": self._ends})
        if self._request:
            self._send(self._request)

    def _receive(self) -> None:
        assert self._link is not None
        try:
            data = self._link.recv(CHUNK_BYTES)  # bounded: the selector reports data
            self._silent_pings = 0
            for header, _ in self._reader.feed(data):
                self._handle(header)
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._on_broken_link()

    def _on_broken_link(self) -> None:
        self._disconnect()
        if self._exit_code is None and self._candidate is None:  # else: the candidate has closed; it is tried again
            self._lose_coordinator()

    def _ping(self) -> None:
        """Shows the coordinator that this process runs; one that has long shown nothing counts as lost."""
        now_s = time.monotonic()
        if self._link is None or now_s < self._next_ping_s:
            return
        self._next_ping_s = now_s + PING_S
        self._silent_pings += 1
        if self._silent_pings <= max_silent_pings(self._timeouts.control_s):
            self._send({"op": "ping"})
            return
        self._on_broken_link()

    def _disconnect(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None

    def _handle(self, header: dict[str, Any]) -> None:
        match header["op"]:
            case "welcome":
                self._on_welcome()
            case "failover_plan":
                self._failover_plan = FailoverPlan.from_json(header["failover_plan"])
            case "monitor":
                self._monitor.begin(
                    HeartbeatTimeouts(
                        heartbeat_timeout_s=header["heartbeat_timeout_s"],
                        watchdog_timeout_s=header["watchdog_timeout_s"],
                    )
                )
            case "request_status":
                for pid in self._children:
                    os.kill(pid, STACK_DUMP_SIGNAL)
            case "stop":
                self._set_kill_deadline(self._timeouts.stop_grace_s)
            case "kill":
                self._kill_lost(dict(header["ends"]))
            case "abort":
                self._set_kill_deadline(header["grace_s"])
            case "over":
                self._exit_code = header["exit_code"]
                self._discovery.send_new_address(None)
                self._set_kill_deadline(self._timeouts.abort_grace_s)

    # --- loss of the coordinator ----------------------------------------------------------------------------------

    def _lose_coordinator(self) -> None:
        """Begins a failover: at the coordinator's own host first, whose stub replaces a process that it saw end."""
        plan = self._failover_plan
        if plan is None:
            self._end_without_coordinator("the run's coordinator is gone")
            return
        others = () if self._own_info.host == plan.coordinator.host else plan.candidates
        self._candidates = [plan.coordinator, *others]
        self._next_candidate()

    def _next_candidate(self) -> None:
        assert self._candidates is not None and self._failover_plan is not None
        self._disconnect()
        if self._candidates:
            self._candidate = self._candidates.pop(0)
            self._welcome_deadline = time.monotonic() + self._timeouts.failover_s
            return
        plan = self._failover_plan
        if self._own_info.host != plan.coordinator.host:
            self._end_without_coordinator("the run's coordinator is gone, and no other host can take over")
        else:
            speaks = self._own_info in (plan.coordinator, *plan.same_host_guardians[:1])
            self._end_without_coordinator("the run's coordinator is gone", should_print=speaks)

    def _try_candidate(self) -> None:
        """Connects to the failover candidate; goes on to the next if it can't be reached or does not answer in time."""
        if self._candidate is None or self._exit_code is not None:
            return
        if time.monotonic() >= self._welcome_deadline:
            self._next_candidate()
        elif self._link is None:
            self._connect_to(self._candidate)

    def _connect_to(self, candidate: GuardianInfo) -> None:
        assert self._failover_plan is not None
        secret = self._discovery.run_secret.read()
        if candidate.ranks == self._own_info.ranks:  # repeated, since the stub refuses while its coordinator serves
            plan = self._failover_plan.to_json()
            self._stub.send({"op": "take_over", "failover_plan": plan, "secret": secret.hex()})
        try:
            self._use(connect(candidate.address, self._hello(), secret, timeout_s=CANDIDATE_CONNECT_S))
        except NotServingError:
            pass
        except OSError:
            self._next_candidate()

    def _on_welcome(self) -> None:
        """Ends the failover: the candidate serves."""
        if self._candidate is not None:
            self._discovery.send_new_address(self._candidate.address)
            self._report_address(self._candidate.address)
            self._candidate = self._candidates = None
            self._welcome_deadline = float("inf")

    def _end_without_coordinator(self, message: str, *, should_print: bool = True) -> None:
        """Ends the run here: no coordinator can be reached."""
        if should_print:
            self._print(message)
        self._exit_code = EXIT_COORDINATOR_LOST
        self._discovery.send_new_address(None)
        self._set_kill_deadline(self._timeouts.abort_grace_s)

    # --- duties ---------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Collects workers that have exited and reports them."""
        ends = []
        for pid, rank in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                ends.append(
                    {
                        "rank": rank,
                        "exit_code": os.waitstatus_to_exitcode(status),
                        "by_guardian": pid in self._enforced,
                        "why": self._declared_dead.get(pid, ""),
                        "detect_s": self._monitor.silent_s(pid),
                        "step": self._monitor.step(pid),
                    }
                )
        if ends:
            self._ends += ends
            self._send({"op": "ended", "ends": ends})
        never_met = self._failover_plan is None and self._link is None
        if not self._children and not self._is_discovering and never_met and self._exit_code is None:
            self._end_alone()

    def _end_alone(self) -> None:
        """Ends: all workers exited before the coordinator was found. Each has printed why, unless it was killed."""
        codes = [end["exit_code"] for end in self._ends]
        self._exit_code = next((code for code in codes if code > 0), EXIT_WORKER_LOST)
        if min(codes, default=0) < 0:
            self._print(f"killed by {signal_name(-min(codes))} before the coordinator was found")

    def _handle_stop_signals(self) -> None:
        for number in self._signals.stops[self._stops_seen :]:
            self._stops_seen += 1
            at_once = self._stops_seen > 1 and signal.SIGINT in self._signals.stops[: self._stops_seen]
            if self._is_discovering:
                self._exit_code = EXIT_BY_SIGNAL + number
            if self._is_discovering or at_once:
                self._kill_all(enforced=True)
            if number == signal.SIGTERM and not at_once:
                self._request = {"op": "announce_drain"}
            else:
                self._request = {"op": "stop", "signal": number, "at_once": at_once}
            self._send(self._request)

    def _forward_status_requests(self) -> None:
        if self._signals.num_status_requests > self._status_requests_seen:
            self._status_requests_seen = self._signals.num_status_requests
            self._send({"op": "request_status"})

    def _kill_unresponsive(self) -> None:
        for pid, why in self._monitor.check(self._children.keys() - self._declared_dead.keys()).items():
            self._declared_dead[pid] = why
            os.kill(pid, signal.SIGKILL)

    def _kill_lost(self, why: dict[int, str]) -> None:
        """Kills workers that the coordinator can't wait for; each counts as lost once its exit is reported."""
        self._reap()  # one that has ended by itself has a reason of its own
        for pid, rank in self._children.items():
            if rank in why and pid not in self._declared_dead:
                self._declared_dead[pid] = why[rank]
                os.kill(pid, signal.SIGKILL)

    def _set_kill_deadline(self, grace_s: float) -> None:
        """Gives workers `grace_s` from now to exit; an earlier deadline stays."""
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def _enforce_deadline(self) -> None:
        if time.monotonic() >= self._deadline:
            self._kill_all(enforced=True)

    def _kill_all(self, *, enforced: bool) -> None:
        """Kills every child. `enforced`: the run is ending anyway, so this is not evidence of a failure."""
        for pid in self._children:
            if enforced:
                self._enforced.add(pid)
            os.kill(pid, signal.SIGKILL)

    def _send(self, header: dict[str, Any]) -> None:
        if self._link is not None:
            try:
                self._link.sendall(encode_frame(header))
            except OSError:
                return  # the coordinator is gone: the next read shows it

    def _print(self, text: str) -> None:
        """Prints to this process's own terminal what the coordinator can't publish."""
        ranks = ", ".join(str(rank) for rank in self._own_info.ranks)
        print(f"guardian of rank {ranks}: {text}", file=sys.stderr, flush=True)


def _lost_with_guardian(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "exit_code": -signal.SIGKILL,
        "by_guardian": False,
        "why": "lost with its guardian",
        "detect_s": None,
        "step": None,
    }
