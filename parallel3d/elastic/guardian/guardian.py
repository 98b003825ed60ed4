"""The guardian: the parent process of workers, which outlives them.

It detects a death within milliseconds (SIGCHLD, waitpid) and reports it to the coordinator, kills a worker that gives
no sign of life before it reports it (so that none wakes up in a generation that is over), forwards stop signals, kills
workers that do not exit in time, and stays until the coordinator has the run's exit code. The stub's exit code is that
one, so that a launcher above it never takes a lost worker for success.

It relays between its workers (worker_channels.py) and the coordinator (coordinator_link.py). It never waits for either.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from parallel3d.config.schema import NoticeConfig
from parallel3d.elastic.child_processes import ParentLink
from parallel3d.elastic.coordinator.run_status import EXIT_BY_SIGNAL, signal_name
from parallel3d.elastic.frames import RETRY_S
from parallel3d.elastic.guardian.coordinator_link import CoordinatorLink
from parallel3d.elastic.guardian.heartbeat import CHECK_INTERVAL_S, HeartbeatMonitor, HeartbeatTimeouts
from parallel3d.elastic.guardian.host_notice import HostNotice
from parallel3d.elastic.guardian.link_events import LinkEvents
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.guardian.signals import STACK_DUMP_SIGNAL, Signals
from parallel3d.elastic.guardian.spawn import HeldResource
from parallel3d.elastic.guardian.worker_channels import WorkerChannels
from parallel3d.elastic.guardian.worker_forks import ForkedWorker, WorkerForks
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.errors import EXIT_COORDINATOR_LOST, EXIT_WORKER_LOST, LaunchError, UserError
from parallel3d.parallel.grid import PartId

TICK_S = 0.5


class Guardian:
    """Guards `workers`, which this process has forked, and forks others; `own_info` describes it to others.

    `address`: the coordinator's; None until a worker finds it. `is_at_coordinator`: it began on this host.
    `lost_ranks`: the workers of the guardian before this one, which died with it. `failover_plan`: what that one knew.
    `leaves`: it ends with its workers.
    `notice`: how its host may learn that it will be taken away. `relay_address`: of its relay, by secret.
    """

    def __init__(
        self,
        workers: Sequence[ForkedWorker],
        *,
        forks: WorkerForks,
        address: Address | None,
        is_at_coordinator: bool,
        run_secret: RunSecret,
        signals: Signals,
        timeouts: LaunchTimeouts,
        own_info: GuardianInfo,
        link: ParentLink,
        notice: NoticeConfig,
        lost_ranks: Sequence[int] = (),
        failover_plan: FailoverPlan | None = None,
        leaves: bool = False,
        relay_address: Callable[[bytes], str] | None = None,
    ):
        self._children = {worker.pid: worker.rank for worker in workers}
        self._forks = forks
        self._monitor = HeartbeatMonitor({each.pid: each.heartbeats for each in workers}, stopped_s=timeouts.control_s)
        self._declared_dead: dict[int, str] = {}
        """Unresponsive workers that it has killed: pid -> reason."""
        self._broken: dict[int, str] = {}  # by rank: why it can't be relayed for any more
        self._own_info = own_info
        self._stub = link
        self._timeouts, self._signals = timeouts, signals
        self._run_secret = run_secret
        self._is_at_coordinator, self._leaves = is_at_coordinator, leaves
        self._stops_seen = self._requests_seen = 0
        self._request: dict[str, Any] | None = None
        """The frame of the newest stop signal."""
        self._deadline = float("inf")
        self._enforced: set[int] = set()
        self._exit_code: int | None = None
        """The run's, once the coordinator has sent it or is lost."""
        self._ends = [_never_ran(rank, "lost with its guardian") for rank in lost_ranks]
        """Exits of its workers, repeated to every new coordinator."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wakeup, selectors.EVENT_READ, signals.drain)
        self._selector.register(link.connection, selectors.EVENT_READ, self._on_stub_message)
        self._link = self._make_link(relay_address)
        self._notice = self._watch_for(notice)
        ends = {worker.rank: worker.end for worker in workers}
        self._channels = WorkerChannels(
            self._selector, ends, link=self._link, on_located=self._on_located, on_broken=self._broken.__setitem__
        )
        forks.on_lost(lost_ranks)
        if address:
            self._find(address, failover_plan)

    def monitor(self) -> int:
        """Guards the workers until the run is over; returns its exit code."""
        try:
            while self._children or self._exit_code is None:
                self._reap()
                self._handle_stop_signals()
                self._handle_requests()
                self._notice.turn()
                self._kill_unresponsive()
                self._enforce_deadline()
                self._link.turn()
                self._offer_slots(self._forks.rejoins.take_due(time.monotonic()))
                self._stub.beat()
                for key, _ in self._selector.select(self._turn_s()):
                    key.data()
                self._channels.turn()
            return self._exit_code
        finally:
            self._kill_all(enforced=False)
            self._notice.close()
            self._link.close()
            self._channels.close_all()
            self._selector.close()

    def _turn_s(self) -> float:
        if not self._children and self._exit_code is not None:  # its last worker has ended in this turn
            return 0.0
        seconds = CHECK_INTERVAL_S if self._monitor.active else TICK_S
        return min(RETRY_S, seconds) if self._link.is_searching else seconds

    def _on_stub_message(self) -> None:
        for message in self._stub.receive():
            self._signals.add(message["number"])

    # --- the coordinator ------------------------------------------------------------------------------------------

    def _make_link(self, relay_address: Callable[[bytes], str] | None) -> CoordinatorLink:
        events = LinkEvents(
            greet=self._hello,
            on_welcome=self._on_welcome,
            on_frame=self._handle,
            on_lost=self._on_coordinator_lost,
            on_relay_lost=self._on_relay_lost,
            on_end=self._end_without_coordinator,
        )
        return CoordinatorLink(
            self._selector,
            own_info=self._own_info,
            run_secret=self._run_secret,
            stub=self._stub,
            timeouts=self._timeouts,
            events=events,
            relay_address=relay_address,
        )

    def _find(self, address: Address, failover_plan: FailoverPlan | None = None) -> None:
        """Looks for the coordinator; if this host has a relay, the first rank's stub starts it now."""
        if self._link.relay_address is not None:
            secret = self._run_secret.known
            self._stub.send({"op": "find", "address": list(address), **({"secret": secret.hex()} if secret else {})})
        self._link.find(address, failover_plan)

    def _on_located(self, address: Address, secret: bytes) -> None:
        """Connects to where the first worker has found the coordinator."""
        if not (self._link.was_found or self._link.is_searching or self._exit_code is not None):
            self._run_secret.set(secret)
            self._find(address)

    def _hello(self) -> dict[str, Any]:
        timeouts = self._monitor.timeouts
        num_workers = len(self._children.keys() - self._declared_dead.keys())
        known = {"num_workers": num_workers, "joined": self._forks.joined}
        known["monitor"] = asdict(timeouts) if timeouts else None
        return {"op": "hello", "role": "guardian", **self._own_info.to_json(), **known}

    def _on_welcome(self) -> None:
        """Sends a coordinator what it must know: the workers' words first, then which of them have ended."""
        self._channels.on_welcome(self._run_secret.read())
        if self._ends:
            self._link.send({"op": "ended", "ends": self._ends})
        if notice := self._notice.frame():
            self._link.send(notice)
        if self._request:
            self._link.send(self._request)
        self._offer_slots(self._forks.rejoins.offered)

    def _handle(self, header: dict[str, Any], payload: bytes) -> None:
        match header["op"]:
            case "to_workers":
                self._channels.send(header["ranks"], payload)
            case "start_worker":
                self._start_worker(header["slot"], header["rank"], (header["part"][0], header["part"][1]))
            case "leaves_slow":
                self._forks.mark_slow(header["rank"], header["leaves"])
            case "end_rejoins":
                self._forks.rejoins.end()
            case "close_worker":
                self._channels.close(header["rank"])
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
                if why := header.get("why"):
                    self._print(why)
                self._link.end()
                self._set_kill_deadline(self._timeouts.abort_grace_s)

    def _on_coordinator_lost(self) -> None:
        self._channels.lose_coordinator("the coordinator is gone", is_final=self._exit_code is not None)

    def _on_relay_lost(self) -> None:
        """Kills the workers: what of their words has arrived is not known. This guardian stays, and reports it."""
        self._kill_lost(dict.fromkeys(self._children.values(), "lost with its host's relay"))

    def _end_without_coordinator(self, message: str, should_print: bool) -> None:
        """Ends the run here: no coordinator can be reached."""
        if should_print:
            role = "guardian of rank" if self._link.was_found else "rank"
            self._print(message, role=role)
        never_began = not self._link.was_found and not self._ends
        self._exit_code = LaunchError.exit_code if never_began else EXIT_COORDINATOR_LOST
        self._link.end()
        self._channels.lose_coordinator(message, is_final=True)
        self._set_kill_deadline(self._timeouts.abort_grace_s)

    # --- duties ---------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Collects workers that have exited and reports them, after their last words."""
        ends = []
        for pid, rank in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                permission = self._channels.drain(rank)
                exit_code = os.waitstatus_to_exitcode(status)
                if exit_code not in (0, UserError.exit_code):  # what a user must mend would only fail again
                    self._forks.on_lost([rank])
                elif exit_code == 0:
                    self._forks.on_left(rank)
                ends.append(
                    {
                        "rank": rank,
                        "exit_code": exit_code,
                        "by_guardian": pid in self._enforced,
                        "why": self._declared_dead.get(pid, ""),
                        "detect_s": self._monitor.silent_s(pid),
                        "step": self._monitor.step(pid),
                        "permission": permission,
                    }
                )
        if ends:
            self._ends += ends
            self._link.send({"op": "ended", "ends": ends})
        never_met = not (self._link.was_found or self._link.is_searching)
        if not self._children and never_met and self._exit_code is None:
            self._end_alone()
        if self._leaves and self._exit_code is None and not (self._children or self._forks.rejoins.is_pending):
            last = self._ends[-1]
            is_drain = self._request is not None and self._request["op"] == "announce_drain"
            if is_drain or last["permission"] != "finished":  # else the run is over, and its exit code will come
                self._exit_code = last["exit_code"] if last["exit_code"] >= 0 else EXIT_WORKER_LOST
                if self._exit_code:
                    self._print(self._forks.describe_end(last["rank"], last["exit_code"]))

    def _end_alone(self) -> None:
        """Ends: all workers exited before the coordinator was found. Each has printed why, unless it was killed."""
        codes = [end["exit_code"] for end in self._ends]
        self._exit_code = next((code for code in codes if code > 0), EXIT_WORKER_LOST)
        if min(codes, default=0) < 0:
            self._print(f"killed by {signal_name(-min(codes))} before the coordinator was found")

    def _offer_slots(self, slots: Iterable[int]) -> None:
        """Offers to start workers; without a coordinator the next one gets the offers."""
        for slot in slots:
            self._link.send({"op": "offer_worker", "slot": slot})

    def _start_worker(self, slot: int, rank: int, part: PartId) -> None:
        """Forks a worker that joins the run as `rank`; if that can't be, it is one that has ended."""
        try:
            held: list[HeldResource] = [self._selector, self._stub.connection]
            held += [*self._link.sockets(), *self._channels.sockets()]
            worker = self._forks.fork_joiner(slot, rank=rank, part=part, held=held)
        except OSError as error:
            self._ends.append(_never_ran(rank, f"not started ({error})"))
            self._link.send({"op": "ended", "ends": self._ends[-1:]})
            return
        self._children[worker.pid] = rank
        self._monitor.add(worker.pid, worker.heartbeats)
        self._channels.add(rank, worker.end, self._run_secret.read())

    def _handle_stop_signals(self) -> None:
        for number in self._signals.stops[self._stops_seen :]:
            self._stops_seen += 1
            at_once = self._stops_seen > 1 and signal.SIGINT in self._signals.stops[: self._stops_seen]
            is_alone = not (self._link.was_found or self._is_at_coordinator)
            if is_alone:
                self._exit_code = EXIT_BY_SIGNAL + number
                self._link.end()
            if is_alone or at_once:
                self._kill_all(enforced=True)
            self._forks.rejoins.end()
            if number == signal.SIGTERM and not at_once:
                self._request = {"op": "announce_drain"}
            else:
                self._request = {"op": "stop", "signal": number, "at_once": at_once}
            self._link.send(self._request)

    def _handle_requests(self) -> None:
        """Handles user signals: a request for the status of all workers, or a notice."""
        new = self._signals.requests[self._requests_seen :]
        self._requests_seen += len(new)
        if self._notice.status_signal in new:
            self._link.send({"op": "request_status"})
        for number in new:
            self._notice.on_signal(number)

    def _watch_for(self, notice: NoticeConfig) -> HostNotice:
        return HostNotice(notice, selector=self._selector, on_notice=self._on_notice, on_trouble=self._print)

    def _on_notice(self) -> None:
        """Reports that this host will be taken away; no worker is started on it any more."""
        self._forks.rejoins.end()
        if frame := self._notice.frame():
            self._link.send(frame)

    def _kill_unresponsive(self) -> None:
        for pid, why in self._monitor.check(self._children.keys() - self._declared_dead.keys()).items():
            self._declared_dead[pid] = why
            os.kill(pid, signal.SIGKILL)
        if self._broken:
            self._kill_lost(self._broken)
            self._broken.clear()

    def _kill_lost(self, why: dict[int, str]) -> None:
        """Kills workers that the run can't wait for; each counts as lost once its exit is reported."""
        self._reap()  # one that has ended by itself has a reason of its own
        for pid, rank in self._children.items():
            if rank in why and pid not in self._declared_dead:
                self._declared_dead[pid] = why[rank]
                os.kill(pid, signal.SIGKILL)

    def _set_kill_deadline(self, grace_s: float) -> None:
        """Gives workers `grace_s` from now to exit; an earlier deadline stays."""
        self._forks.rejoins.end()
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

    def _print(self, text: str, *, role: str = "guardian of rank") -> None:
        """Prints to this process's own terminal what the coordinator can't publish."""
        ranks = ", ".join(str(rank) for rank in self._own_info.ranks)
        print(f"{role} {ranks}: {text}", file=sys.stderr, flush=True)


def _never_ran(rank: int, why: str) -> dict[str, Any]:
    """The end of a worker that this guardian has not had."""
    return {
        "rank": rank,
        "exit_code": -signal.SIGKILL,
        "by_guardian": False,
        "why": why,
        "detect_s": None,
        "step": None,
        "permission": "",
    }
