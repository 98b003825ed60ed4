"""The guardian: the parent process of workers, which outlives them.

It notices a death within milliseconds (SIGCHLD, waitpid) and reports it as evidence, kills a worker that gives no sign
of life before it reports it (none wakes up in an epoch that is over), passes a person's stop on, kills what does not
leave in time, and stays until the coordinator says how the run has ended: that exit code is its own, so that a launcher
above it never takes a lost worker for success. It does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

from parallel3d.elastic.control import CHUNK_BYTES, FrameReader, encode_frame, open_connection
from parallel3d.elastic.coordinator import Limits
from parallel3d.elastic.finder import Finder
from parallel3d.elastic.membership import Address
from parallel3d.elastic.pulse import LOOK_S, Patience, Watch
from parallel3d.elastic.succession import GuardianPlace, Roster
from parallel3d.elastic.verdict import EXIT_BY_SIGNAL, signal_name
from parallel3d.errors import EXIT_COORDINATOR_LOST, EXIT_WORKER_LOST, LaunchError, ProtocolError

TICK_S = 0.5
HEIR_CONNECT_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ASK_SIGNAL = signal.SIGUSR1
"""A guardian passes the question on where everybody is; a worker writes its stacks into its log."""


class Signals:
    """Collects SIGINT, SIGTERM, SIGUSR1 and SIGCHLD while it is entered, and wakes a selector through `wakeup`."""

    def __init__(self) -> None:
        self.stops: list[int] = []
        """The stop signals that have come, oldest first."""
        self.num_asks = 0
        """How often somebody has asked where everybody is."""
        self.wakeup, self._writer = socket.socketpair()
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        for end in (self.wakeup, self._writer):
            end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, ASK_SIGNAL, signal.SIGCHLD):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self.wakeup.close()
        self._writer.close()

    def wait(self, seconds: float) -> bool:
        """Waits so long, or until a stop signal has come; whether one has."""
        deadline = time.monotonic() + seconds
        while not self.stops and (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([self.wakeup], [], [], left)
            for end in readable:
                end.recv(CHUNK_BYTES)  # bounded: there is news
        return bool(self.stops)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            self.stops.append(number)
        self.num_asks += number == ASK_SIGNAL


TakeOver = Callable[[Roster], Address]
"""Begins to serve as the coordinator's successor, in this process; returns where."""


class Guardian:
    """Watches over `children` (pid -> rank), which are this process's own; `own` is what the others know of it."""

    def __init__(
        self,
        children: Mapping[int, int],
        *,
        watch: Watch,
        finder: Finder,
        signals: Signals,
        limits: Limits,
        own: GuardianPlace,
        take_over: TakeOver,
    ):
        self._children = dict(children)
        self._watch = watch
        self._given_up: dict[int, str] = {}
        """Pids that it has killed, and why."""
        self._own = own
        self._take_over = take_over
        self._serves = False
        """The coordinator's successor is in this process."""
        self._roster: Roster | None = None
        self._heirs: list[GuardianPlace] | None = None
        """Who might have taken over and has not been asked; None while there is a coordinator."""
        self._heir: Address | None = None
        """Who has been asked."""
        self._answer_deadline = float("inf")
        self._limits = limits
        self._signals = signals
        self._stops_seen = 0
        self._asks_seen = 0
        self._request: dict[str, Any] | None = None
        """What the newest stop asks for."""
        self._deadline = float("inf")
        self._enforced: set[int] = set()
        self._link: socket.socket | None = None
        self._reader = FrameReader()
        self._exit_code: int | None = None
        """The run's, once the coordinator has said it (or is gone)."""
        self._ends: list[dict[str, Any]] = []
        """Of all workers that have ended: whoever becomes coordinator is told."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wakeup, selectors.EVENT_READ, self._drain_wakeup)
        self._finder = finder
        self._seeking = finder.own_address is None
        if finder.own_address:
            self._connect_first(finder.own_address)
        else:
            self._selector.register(finder.pipe, selectors.EVENT_READ, self._learn_address)

    def watch(self, *, parent: int | None) -> int:
        """The run's exit code, once it is over. Ends everything when its own `parent` (None: any) is gone."""
        try:
            while self._children or self._seeking or self._exit_code is None:
                self._reap()
                self._heed_stops()
                self._pass_questions_on()
                self._give_up_the_silent()
                self._enforce_deadline()
                self._ask_next_heir()
                if parent is not None and os.getppid() != parent:
                    self._kill_all(enforced=False)
                for key, _ in self._selector.select(LOOK_S if self._watch.active else TICK_S):
                    key.data()
            return self._exit_code
        finally:
            self._kill_all(enforced=False)
            if self._link is not None:
                self._link.close()

    # Sources of news

    def _drain_wakeup(self) -> None:
        self._signals.wakeup.recv(CHUNK_BYTES)  # bounded: does not block, the selector says that there is news

    def _learn_address(self) -> None:
        address = self._finder.read_answer()
        self._selector.unregister(self._finder.pipe)
        self._seeking = False
        if address:
            self._connect_first(address)

    def _connect_first(self, address: Address) -> None:
        try:
            self._connect(address, timeout_s=self._limits.connect_s)
        except LaunchError as error:
            self._do_without(str(error))

    def _connect(self, address: Address, *, timeout_s: float) -> None:
        hello = {"op": "hello", "role": "guardian", **self._own.to_json()}
        self._link = open_connection(address, hello, timeout_s=timeout_s)
        self._reader = FrameReader()
        self._selector.register(self._link, selectors.EVENT_READ, self._hear)
        if self._ends:
            self._tell({"op": "ended", "ends": self._ends})
        if self._request:
            self._tell(self._request)

    def _hear(self) -> None:
        assert self._link is not None
        try:
            data = self._link.recv(CHUNK_BYTES)  # bounded: the selector says that there is news
            for header, _ in self._reader.feed(data):
                self._heed(header)
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._hang_up()
            if self._exit_code is None:
                self._lose_coordinator()

    def _hang_up(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None

    def _heed(self, header: dict[str, Any]) -> None:
        match header["op"]:
            case "welcome":
                self._settle()
            case "roster":
                self._roster = Roster.from_json(header["roster"])
            case "watch":
                self._watch.begin(Patience(silence_s=header["silence_s"], stuck_s=header["stuck_s"]))
            case "where":
                for pid in self._children:
                    os.kill(pid, ASK_SIGNAL)
            case "stop":
                self._allow(self._limits.stop_grace_s)
            case "abort":
                self._allow(header["grace_s"])
            case "over":
                self._exit_code = header["exit_code"]
                self._finder.redirect(None)
                self._allow(self._limits.abort_grace_s)

    # When the coordinator is lost

    def _lose_coordinator(self) -> None:
        """Its host's guardians end; those of other hosts look for its successor."""
        told = "the run's coordinator is gone"
        roster = self._roster
        if roster is None:
            self._do_without(told)
        elif self._own.host == roster.coordinator.host or self._serves:
            self._do_without(told, aloud=self._serves or self._own in roster.bereaved[:1])
        elif self._heirs is None:
            self._heirs = list(roster.heirs)

    def _ask_next_heir(self) -> None:
        """Turns to the next heir once the one before can't be reached or does not answer in time."""
        if self._heirs is None or self._exit_code is not None:
            return
        if self._link is not None and time.monotonic() < self._answer_deadline:
            return
        self._hang_up()
        if not self._heirs:
            self._do_without("the run's coordinator is gone, and nobody takes over")
            return
        heir = self._heirs.pop(0)
        assert self._roster is not None
        self._serves = heir == self._own
        self._heir = self._take_over(self._roster) if self._serves else heir.address
        with contextlib.suppress(LaunchError):
            self._connect(self._heir, timeout_s=HEIR_CONNECT_S)
        self._answer_deadline = time.monotonic() + self._limits.muster_s

    def _settle(self) -> None:
        """There is a coordinator that answers."""
        if self._heirs is not None and self._heir is not None:
            self._finder.redirect(self._heir)
            self._heirs, self._answer_deadline = None, float("inf")

    def _do_without(self, message: str, *, aloud: bool = True) -> None:
        """Nobody is left who could say how the run ends."""
        if aloud:
            self._say(message)
        self._exit_code = EXIT_COORDINATOR_LOST
        self._finder.redirect(None)
        self._allow(self._limits.abort_grace_s)

    # Duties

    def _reap(self) -> None:
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
                        "why": self._given_up.get(pid, ""),
                        "detect_s": self._watch.silent_s(pid),
                        "step": self._watch.step(pid),
                    }
                )
        if ends:
            self._ends += ends
            self._tell({"op": "ended", "ends": ends})
        never_met = self._roster is None and self._link is None
        if not self._children and not self._seeking and never_met and self._exit_code is None:
            self._end_alone()

    def _end_alone(self) -> None:
        """All its workers have ended before the coordinator was found; each has said why, unless it was killed."""
        codes = [end["exit_code"] for end in self._ends]
        self._exit_code = next((code for code in codes if code > 0), EXIT_WORKER_LOST)
        if min(codes, default=0) < 0:
            self._say(f"killed by {signal_name(-min(codes))} before the coordinator was found")

    def _heed_stops(self) -> None:
        for number in self._signals.stops[self._stops_seen :]:
            self._stops_seen += 1
            at_once = self._stops_seen > 1 and signal.SIGINT in self._signals.stops[: self._stops_seen]
            if self._seeking:
                self._exit_code = EXIT_BY_SIGNAL + number
            if self._seeking or at_once:
                self._kill_all(enforced=True)
            if number == signal.SIGTERM and not at_once:
                self._request = {"op": "leave"}
            else:
                self._request = {"op": "stop", "signal": number, "at_once": at_once}
            self._tell(self._request)

    def _pass_questions_on(self) -> None:
        if self._signals.num_asks > self._asks_seen:
            self._asks_seen = self._signals.num_asks
            self._tell({"op": "where"})

    def _give_up_the_silent(self) -> None:
        for pid, why in self._watch.look(self._children.keys() - self._given_up.keys()).items():
            self._given_up[pid] = why
            os.kill(pid, signal.SIGKILL)

    def _allow(self, grace_s: float) -> None:
        """Workers have `grace_s` from now to leave, or less where that was said before."""
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def _enforce_deadline(self) -> None:
        if time.monotonic() >= self._deadline:
            self._kill_all(enforced=True)

    def _kill_all(self, *, enforced: bool) -> None:
        """SIGKILL for every child. `enforced`: the run is ending anyway, so this is not evidence of a failure."""
        for pid in self._children:
            if enforced:
                self._enforced.add(pid)
            os.kill(pid, signal.SIGKILL)

    def _tell(self, header: dict[str, Any]) -> None:
        if self._link is not None:
            try:
                self._link.sendall(encode_frame(header))
            except OSError:
                return  # the coordinator is gone: the next read says so

    def _say(self, text: str) -> None:
        """A line on this process's own terminal, for what the coordinator can't tell."""
        ranks = ", ".join(str(rank) for rank in self._own.ranks)
        print(f"guardian of rank {ranks}: {text}", file=sys.stderr, flush=True)
