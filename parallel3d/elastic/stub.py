"""The stub: the process that the user or a launcher has started. Single-threaded, without torch or state of the run.

It forks the guardian and the coordinator, waits, passes signals on, and ends with the run's exit code.

    guardian killed      its workers died with it: a new guardian reports that, and stays until the run is over
    coordinator killed   the stub has seen it end, so none serves here: when the guardian asks for it, which may be a
                         moment earlier, a failover coordinator begins at the same listener
    relay killed         (one a host, on large runs under a launcher: guardian/relay.py) the guardians do without
    one of them silent   (stopped, or stuck): the stub kills it before others count it as lost, so that it can't wake
                         up in a run that goes on without it
    stub killed          all below it die (PR_SET_PDEATHSIG)
    launcher gone        the stub ends, and with it all below it

A child that ends by a defect, with a traceback, ends the run: it would recur.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from parallel3d.elastic.child_processes import ChildProcess, ParentLink
from parallel3d.elastic.coordinator.run_status import EXIT_BY_SIGNAL, signal_name
from parallel3d.elastic.frames import PING_S
from parallel3d.elastic.guardian.coordinator_link import CANDIDATE_CONNECT_S
from parallel3d.elastic.guardian.signals import Signals
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.errors import EXIT_COORDINATOR_LOST, EXIT_WORKER_LOST, UserError

Message = dict[str, Any]
STUB_PATIENCE = 0.75
"""Of `control_s`: a silent child is dead before other processes, which know less, count it as lost."""


class ChildPrograms(Protocol):
    """The main functions of the stub's children."""

    @property
    def first_coordinator(self) -> Address | None:
        """The address at which the run's first coordinator serves, if it does so on this host."""

    @property
    def has_relay(self) -> bool:
        """Whether this stub starts its host's relay."""

    @property
    def known_address(self) -> Address | None:
        """That address, if it is known from the start; None: workers find it."""

    def run_guardian(self, link: ParentLink) -> int: ...

    def run_relay(self, link: ParentLink, request: Message) -> int:
        """`request`: the guardian's, once it knows the coordinator's address."""

    def run_coordinator(self, link: ParentLink, failover: Message | None) -> int:
        """`failover`: the guardian's request for one that takes over."""


class Stub:
    """Runs until the run has ended, or the process `parent` is gone."""

    def __init__(self, programs: ChildPrograms, *, timeouts: LaunchTimeouts, parent: int | None):
        self._programs = programs
        self._timeouts = timeouts
        self._parent = parent
        self._signals = Signals()
        self._stops_seen = self._requests_seen = 0
        self._selector = selectors.DefaultSelector()
        self._next_check_s = 0.0
        self._guardian: ChildProcess | None = None
        self._coordinator: ChildProcess | None = None
        self._relay: ChildProcess | None = None
        self._location: Message = {}
        """What a new guardian must know: the coordinator's address, the run's secret, who may take over."""
        self._is_start_due = False
        """The guardian should begin the next start once it has ended the one before."""
        self._is_running = self._has_workers = False
        """The guardian is in a start of the run; as the one that forked its workers."""
        self._guardian_code: int | None = None
        """The exit code of the last start, by the guardian."""
        self._coordinator_code: int | None = None
        """That of the run, by the coordinator."""
        self._deadline_s = float("inf")
        """By then the guardian must have ended its start, or have asked for a failover coordinator."""
        self._has_moved = False
        """The coordinator has ended since another host's goes on with the run."""
        self._early_request: tuple[float, Message] | None = None
        """A request to take over that came while the coordinator's process was there, and until when it stands."""
        self._exit_code: int | None = None
        self._is_parent_gone = False
        self._refusal = ""

    def run(self) -> int:
        """Returns the run's exit code. Raises UserError if the run can't begin."""
        with self._signals:
            self._selector.register(self._signals.wakeup, selectors.EVENT_READ, self._signals.drain)
            try:
                if self._programs.known_address:
                    self._location = {"address": list(self._programs.known_address)}
                if self._programs.first_coordinator:
                    self._fork_coordinator(None)
                else:
                    self._is_start_due = True
                self._fork_guardian()
                while self._exit_code is None:
                    self._turn()
                self._await_relay()
            finally:
                for child in self._children:
                    child.kill()
        if self._refusal:
            raise UserError(self._refusal)
        return self._exit_code

    @property
    def _children(self) -> list[ChildProcess]:
        return [child for child in (self._guardian, self._coordinator, self._relay) if child is not None]

    def _turn(self) -> None:
        self._begin_start()
        for key, _ in self._selector.select(max(0.0, self._next_check_s - time.monotonic())):
            key.data()
        self._reap()
        self._pass_on_signals()
        self._check()
        self._decide()

    def _await_relay(self) -> None:
        """Lets the relay bring the other guardians of this host the end of the run."""
        deadline = time.monotonic() + self._timeouts.abort_grace_s + 2 * PING_S
        while self._relay is not None and not self._is_parent_gone and time.monotonic() < deadline:
            self._turn()

    # --- the course of the run ------------------------------------------------------------------------------------

    def _begin_start(self) -> None:
        if self._is_start_due and not self._is_running and self._guardian is not None:
            secret = {} if self._programs.first_coordinator is None else {"secret": self._location["secret"]}
            self._guardian.send({"op": "start", **secret})
            self._is_start_due, self._is_running, self._has_workers = False, True, True
            self._guardian_code, self._deadline_s = None, float("inf")

    def _decide(self) -> None:
        """Ends the run if there is nothing left to wait for."""
        is_late = self._is_running and time.monotonic() >= self._deadline_s
        if self._exit_code is not None:
            return
        if self._coordinator_code is not None:
            self._exit_code = self._coordinator_code if is_late or not self._is_running else None
        elif self._coordinator is not None:
            if is_late and self._is_start_due and self._guardian is not None:
                self._guardian.signal(signal.SIGKILL)
        elif self._guardian_code is not None and not self._is_start_due:
            self._exit_code = self._guardian_code
        elif is_late or (self._programs.first_coordinator and not self._is_running):
            self._end("the run's coordinator is gone", EXIT_COORDINATOR_LOST)

    def _on_coordinator_message(self, message: Message) -> None:
        match message["op"]:
            case "start":
                self._location["secret"] = message["secret"]
                self._is_start_due = True
                self._limit_guardian()
            case "refused":
                self._refusal, self._exit_code = message["text"], message["exit_code"]
            case "moved":
                self._has_moved = True
            case "done":
                self._coordinator_code = message["exit_code"]
                self._limit_guardian()

    def _limit_guardian(self) -> None:
        """Gives the guardian time to end the start that is over for the coordinator; none if it has no workers."""
        grace_s = self._timeouts.abort_grace_s + PING_S if self._has_workers else 0.0
        self._deadline_s = time.monotonic() + grace_s

    def _on_guardian_message(self, message: Message) -> None:
        match message["op"]:
            case "find" if self._programs.has_relay and self._relay is None:
                self._relay = self._fork("relay", lambda link: self._programs.run_relay(link, message))
            case "located":
                self._location |= {"address": message["address"], "secret": message["secret"]}
                self._early_request = None  # it was answered by the coordinator that serves
            case "failover_plan":
                self._location["failover_plan"] = message["failover_plan"]
            case "take_over":
                self._take_over(message)
            case "ended":
                self._is_running, self._guardian_code = False, message["exit_code"]
                self._early_request = None

    def _take_over(self, request: Message) -> None:
        """Starts a failover coordinator, unless one serves; kills one that is silent first.

        The connections of a process that ends are closed before its parent can collect it: for as long as the guardian
        waits for an answer, its request stands.
        """
        if self._coordinator is not None:
            if self._coordinator.silent_turns * PING_S < self._timeouts.control_s / 2:
                self._early_request = time.monotonic() + CANDIDATE_CONNECT_S, request
                return
            self._coordinator.kill()
            self._disconnect(self._coordinator)
        self._deadline_s, self._early_request = float("inf"), None
        self._fork_coordinator(request)

    def _end(self, text: str, exit_code: int) -> None:
        print(text, file=sys.stderr, flush=True)
        self._exit_code = exit_code

    # --- children -------------------------------------------------------------------------------------------------

    def _fork_guardian(self) -> None:
        self._guardian = self._fork("guardian", self._programs.run_guardian)

    def _fork_coordinator(self, failover: Message | None) -> None:
        self._coordinator = self._fork("coordinator", lambda link: self._programs.run_coordinator(link, failover))

    def _fork(self, name: str, main: Callable[[ParentLink], int]) -> ChildProcess:
        def run(link: ParentLink) -> int:
            self._selector.close()
            for other in self._children:
                other.connection.close()
            return main(link)

        child = ChildProcess(name, run)
        self._selector.register(child.connection, selectors.EVENT_READ, lambda: self._receive(child))
        return child

    def _receive(self, child: ChildProcess) -> bool:
        """Handles the messages that have arrived; returns False if there were none."""
        messages = child.receive()
        if messages is None:
            self._disconnect(child)
        has_ended = any(message["op"] == "ended" for message in messages or ())
        for message in messages or ():
            if child is self._guardian:
                if not (has_ended and message["op"] == "take_over"):  # it has given up while this stub was stopped
                    self._on_guardian_message(message)
            elif child is self._coordinator:
                self._on_coordinator_message(message)
        return bool(messages)

    def _disconnect(self, child: ChildProcess) -> None:
        if child.connection.fileno() >= 0:
            self._selector.unregister(child.connection)
            child.connection.close()

    def _reap(self) -> None:
        """Takes notice of children that have ended, and of their last messages first."""
        for child in self._children:
            if (code := child.exit_code()) is None:
                continue
            while child.connection.fileno() >= 0 and self._receive(child):  # bounded: by what it has sent
                pass
            self._disconnect(child)
            if child is self._guardian:
                self._on_guardian_exit(code)
            elif child is self._coordinator:
                self._on_coordinator_exit(code)
            else:
                self._on_relay_exit(code)

    def _on_guardian_exit(self, code: int) -> None:
        """Replaces a guardian that was killed. Its workers died with it: the new one reports that."""
        self._guardian, was_running, self._is_running = None, self._is_running, False
        if self._exit_code is not None or self._coordinator_code is not None:
            return
        if code >= 0:
            self._exit_code = code or EXIT_WORKER_LOST
            return
        if was_running and not self._is_start_due and not self._location:
            self._end(f"the guardian was killed by {signal_name(-code)} before the run began", EXIT_WORKER_LOST)
            return
        self._fork_guardian()
        if was_running and not self._is_start_due and self._guardian is not None:
            known = {name: self._location[name] for name in ("secret", "failover_plan") if name in self._location}
            self._guardian.send({"op": "start", **known, "lost_at": self._location["address"]})
            self._is_running, self._has_workers = True, False

    def _on_coordinator_exit(self, code: int) -> None:
        """Starts another one, if it was killed, once the guardian has asked for it."""
        (until_s, request), self._early_request = self._early_request or (0.0, {}), None
        self._coordinator = None
        if self._has_moved:
            self._has_moved = False
            return
        if self._exit_code is None and self._coordinator_code is None:
            if code >= 0:
                self._exit_code = code or EXIT_COORDINATOR_LOST
            self._deadline_s = time.monotonic() + self._timeouts.failover_s
            if self._exit_code is None and time.monotonic() < until_s:
                self._take_over(request)

    def _on_relay_exit(self, code: int) -> None:
        """Goes on without: it has ended with its last guardian, or the guardians find the coordinator themselves."""
        self._relay = None
        if code > 0 and self._exit_code is None:
            self._exit_code = code

    def _check(self) -> None:
        """Once a turn of `PING_S`: kills children that are silent, and ends with the launcher."""
        if time.monotonic() < self._next_check_s:
            return
        self._next_check_s = time.monotonic() + PING_S
        for child in self._children:
            child.check_beat()
            if child.silent_turns * PING_S > STUB_PATIENCE * self._timeouts.control_s:
                child.signal(signal.SIGKILL)
        if self._parent is not None and os.getppid() != self._parent:
            self._is_parent_gone, self._exit_code = True, EXIT_WORKER_LOST

    def _pass_on_signals(self) -> None:
        """The children ignore what a terminal sends to all of them."""
        for number in self._signals.stops[self._stops_seen :]:
            self._stops_seen += 1
            if not self._is_running and self._guardian_code is None:
                self._exit_code = EXIT_BY_SIGNAL + number
            if self._guardian is not None and self._is_running:
                self._guardian.send({"op": "signal", "number": number})
            if self._coordinator is not None:
                self._coordinator.signal(number)
        for number in self._signals.requests[self._requests_seen :]:
            self._requests_seen += 1
            if self._guardian is not None:
                self._guardian.send({"op": "signal", "number": number})
