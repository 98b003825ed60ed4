"""The guardian's connection to the coordinator: the first one, and after its loss the search for a successor.

Nothing here waits: the socket does not block, and the guardian's loop calls `turn` again and again.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from parallel3d.elastic.child_processes import ParentLink
from parallel3d.elastic.frames import (
    CHUNK_BYTES,
    PING_S,
    RETRY_S,
    FrameReader,
    encode_frame,
    max_silent_pings,
    set_socket_options,
)
from parallel3d.elastic.guardian.link_events import LinkEvents, Search
from parallel3d.elastic.guardian.name_lookup import NameLookup, as_numeric
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.outbox import Outbox
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.errors import ProtocolError
from parallel3d.handshake import ConnectingHandshake, NotOfThisRunError

RELAY_WAIT_S = 20.0
"""How long this host's relay is looked for: its own guardian may find the coordinator later than others."""
CANDIDATE_CONNECT_S = 1.0
"""For one attempt to reach a failover candidate; then it is asked again to take over."""
LAST_WORDS_S = 1.0
"""For what is still to be sent when the guardian ends."""


class _Phase(Enum):
    CONNECTING = "connecting"
    PROVING = "proving"
    OPEN = "open"


class CoordinatorLink:
    """Connects, pings, and after a loss tries the failover plan's candidates in turn."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        own_info: GuardianInfo,
        run_secret: RunSecret,
        stub: ParentLink,
        timeouts: LaunchTimeouts,
        events: LinkEvents,
        relay_address: Callable[[bytes], str] | None = None,
    ):
        """relay_address: where this host's relay listens, for a secret."""
        self._selector = selector
        self._own_info = own_info
        self._run_secret = run_secret
        self._stub = stub
        self._timeouts = timeouts
        self._events = events
        self.relay_address = relay_address
        self._is_relayed = False
        """Whether the other end of the socket is the relay."""
        self.is_open = False
        """Whether a coordinator has welcomed this guardian."""
        self.was_found = False
        """Whether this guardian has ever reached a coordinator."""
        self._is_over = False
        self._failover_plan: FailoverPlan | None = None
        self._candidates: list[GuardianInfo] = []
        """Failover candidates not tried yet."""
        self._search: Search | None = None
        self._lookup: NameLookup | None = None
        """Of the attempt under way, before it has a socket."""
        self._looked_up: dict[Address, Address] = {}
        self._socket: socket.socket | None = None
        self._phase = _Phase.CONNECTING
        self._handshake: ConnectingHandshake | None = None
        self._secret = b""
        self._reader, self._outbox = FrameReader(), Outbox()
        self._retry_s = self._attempt_deadline_s = self._next_ping_s = 0.0
        self._error = ""
        """Of the newest attempt."""
        self._silent_pings = 0
        """Pings sent since the coordinator's last frame."""

    @property
    def is_searching(self) -> bool:
        return self._search is not None

    @property
    def num_unsent_bytes(self) -> int:
        return self._outbox.num_bytes

    def sockets(self) -> list[socket.socket]:
        """The connection's, if there is one."""
        return [] if self._socket is None else [self._socket]

    def find(self, address: Address, failover_plan: FailoverPlan | None = None) -> None:
        """Begins to connect to the run's first coordinator; with a lost guardian's plan to the one of the plan, which
        may be gone meanwhile."""
        if failover_plan is not None:
            self._failover_plan, self.was_found = failover_plan, True
            self._begin_failover()
            return
        self._begin_search(address, RELAY_WAIT_S if self.relay_address else 0.0)
        self.turn()

    def _begin_search(self, address: Address, relay_wait_s: float) -> None:
        """Looks for a coordinator that serves there; for so long only through the relay."""
        self._address, seconds = address, self._timeouts.connect_s
        until_s = time.monotonic() + relay_wait_s
        self._search = Search(
            address=address, candidate=None, deadline_s=until_s + seconds, attempt_s=seconds, relay_until_s=until_s
        )

    def turn(self) -> None:
        """Does what is due: attempts to connect, pings."""
        now_s, search = time.monotonic(), self._search
        if search is not None:
            is_attempting = self._phase is not _Phase.OPEN and (self._socket is not None or self._lookup is not None)
            if is_attempting and now_s >= self._attempt_deadline_s:
                self._fail("no answer" if self._lookup is None else f"no answer to the look-up of {search.address[0]}")
            elif now_s >= search.deadline_s:
                self._give_up(search)
            elif self._socket is None and self._lookup is None and now_s >= self._retry_s:
                self._attempt(search, now_s)
        self._ping(now_s)

    def send(self, header: dict[str, Any]) -> None:
        """Sends a frame, if a coordinator serves, without waiting."""
        self.send_encoded(encode_frame(header))

    def send_encoded(self, frame: bytes) -> None:
        if self.is_open:
            self._write(frame)

    def end(self) -> None:
        """The run is over: a coordinator that is gone is not searched for."""
        self._is_over, self._search = True, None
        if self._phase is not _Phase.OPEN:
            self._disconnect()

    def close(self) -> None:
        """Closes the connection once everything has been sent, at the latest after a second."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self._socket is not None and self._outbox and (left_s := deadline - time.monotonic()) > 0:
            select.select([], [self._socket], [], left_s)
            try:
                self._outbox.send(self._socket)
            except OSError:
                break
        self._disconnect()

    # --- attempts to connect --------------------------------------------------------------------------------------

    def _attempt(self, search: Search, now_s: float) -> None:
        candidate = search.candidate
        self._phase = _Phase.CONNECTING
        self._attempt_deadline_s = min(search.deadline_s, now_s + search.attempt_s)
        try:
            self._secret = self._run_secret.read()
            if candidate is not None and candidate.ranks == self._own_info.ranks:
                self._ask_to_take_over()  # in each attempt, since the stub refuses while its coordinator serves
            self._is_relayed = self.relay_address is not None and now_s < search.relay_until_s
            if self.relay_address is not None and self._is_relayed:
                self._attempt_deadline_s = min(self._attempt_deadline_s, search.relay_until_s)
                self._connect(self.relay_address(self._secret))
                return
            if address := as_numeric(search.address) or self._looked_up.get(search.address):
                self._connect(address)
                return
            self._lookup = NameLookup(search.address)
        except OSError as error:
            self._fail(str(error))
            return
        self._selector.register(self._lookup, selectors.EVENT_READ, partial(self._on_looked_up, self._lookup, search))

    def _on_looked_up(self, lookup: NameLookup, search: Search) -> None:
        if lookup is not self._lookup:  # closed earlier in this turn
            return
        try:
            address = self._looked_up[search.address] = lookup.address()
            self._end_lookup()
            self._connect(address)
        except OSError as error:
            self._fail(str(error))

    def _connect(self, address: Address | str) -> None:
        """Begins to connect; raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self._socket.setblocking(False)
        set_socket_options(self._socket)
        with contextlib.suppress(BlockingIOError):
            self._socket.connect(address)
        self._selector.register(self._socket, selectors.EVENT_WRITE, partial(self._on_ready, self._socket))

    def _ask_to_take_over(self) -> None:
        assert self._failover_plan is not None
        plan = self._failover_plan.to_json()
        self._stub.send({"op": "take_over", "failover_plan": plan, "secret": self._secret.hex()})

    def _fail(self, error: str) -> None:
        """Ends an attempt. Another one follows, unless not even a listener is there: then the next candidate's turn."""
        search, was_connected = self._search, self._phase is not _Phase.CONNECTING
        self._error = error
        self._disconnect()
        self._retry_s = time.monotonic() + RETRY_S
        if search is not None and search.candidate is not None and not was_connected:
            self._next_candidate()

    def _give_up(self, search: Search) -> None:
        self._disconnect()
        if search.candidate is not None:
            self._next_candidate()
            return
        self._search, (host, port) = None, search.address
        where = f"{host}:{port} within {self._timeouts.connect_s:g} s"
        self._events.on_end(f"could not reach the run's coordinator at {where} ({self._error})", True)

    def _next_candidate(self) -> None:
        plan = self._failover_plan
        assert plan is not None
        self._disconnect()
        if self._candidates:
            candidate = self._candidates.pop(0)
            self._search = Search(
                address=candidate.address,
                candidate=candidate,
                deadline_s=time.monotonic() + self._timeouts.failover_s,
                attempt_s=CANDIDATE_CONNECT_S,
            )
            self._retry_s = 0.0
            return
        self._search = None
        if self._own_info.host != plan.coordinator.host:
            self._events.on_end("the run's coordinator is gone, and no other host can take over", True)
        else:
            speaks = self._own_info in (plan.coordinator, *plan.same_host_guardians[:1])
            self._events.on_end("the run's coordinator is gone", speaks)

    # --- the connection -------------------------------------------------------------------------------------------

    def _on_ready(self, connection: socket.socket) -> None:
        """Goes on with the connection once its socket is ready for anything."""
        if connection is not self._socket:  # closed earlier in this turn
            return
        try:
            if self._phase is _Phase.CONNECTING:
                self._on_connected(connection)
            elif self._phase is _Phase.PROVING:
                self._prove(connection)
            else:
                self._receive(connection)
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            self._on_broken(str(error))
            return
        self._flush()

    def _on_connected(self, connection: socket.socket) -> None:
        if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        self._phase, self._handshake = _Phase.PROVING, ConnectingHandshake(self._secret)
        self._outbox.add(self._handshake.request)

    def _prove(self, connection: socket.socket) -> None:
        assert self._handshake is not None
        data = connection.recv(self._handshake.num_missing)  # bounded: does not block
        if not data:
            raise NotOfThisRunError("closed during the handshake")
        self._outbox.add(self._handshake.feed(data))
        if not self._handshake.is_proven:
            return
        self._phase, self._silent_pings = _Phase.OPEN, 0
        self._run_secret.set(self._secret)
        self._outbox.add(encode_frame(self._events.greet()))
        if self._search is not None and self._search.candidate is None:
            self._report_address(self._search.address)
            self._search, self.was_found = None, True

    def _receive(self, connection: socket.socket) -> None:
        data = connection.recv(CHUNK_BYTES)  # bounded: does not block
        if not data:
            raise OSError("closed")
        self._silent_pings = 0
        for header, payload in self._reader.feed(data):
            match header["op"]:
                case "ping":
                    pass
                case "welcome":
                    self._on_welcome()
                case "coordinator_lost":
                    self._is_relayed = False  # all that it had has arrived
                    raise OSError("the relay has lost the coordinator")
                case "failover_plan":
                    self._failover_plan = FailoverPlan.from_json(header["failover_plan"])
                    self._stub.send(header)  # for a guardian in this one's place
                    if self._failover_plan.is_move:
                        self._is_relayed = False
                        self._on_broken("moved")
                        return
                case _:
                    self._events.on_frame(header, payload)

    def _on_welcome(self) -> None:
        """Ends the failover: the candidate serves."""
        if self._search is not None:
            self._report_address(self._search.address)
            self._search, self._candidates = None, []
        self.is_open = True
        self._events.on_welcome()

    def _report_address(self, address: Address) -> None:
        """Sends the stub what a guardian in this one's place would have to know."""
        self._stub.send({"op": "located", "address": list(address), "secret": self._secret.hex()})

    def _on_broken(self, error: str) -> None:
        if self._search is not None:  # the candidate has closed, or was never there
            self._fail(error)
            return
        self._disconnect()
        has_lost_relay, self._is_relayed = self._is_relayed and not self._is_over, False
        if has_lost_relay:
            self._events.on_relay_lost()
        self._events.on_lost()
        if has_lost_relay and self._failover_plan is None:
            self._begin_search(self._address, 0.0)
        elif not self._is_over:
            self._begin_failover()

    def _begin_failover(self) -> None:
        """Begins a failover: at the coordinator's own host first, whose stub replaces a process that it saw end."""
        plan = self._failover_plan
        if plan is None:
            self._events.on_end("the run's coordinator is gone", True)
            return
        others = () if self._own_info.host == plan.coordinator.host else plan.candidates
        self._candidates = [plan.coordinator, *others]
        self._next_candidate()

    def _ping(self, now_s: float) -> None:
        """Shows the coordinator that this process runs; one that has long shown nothing counts as lost."""
        if self._socket is None or self._phase is not _Phase.OPEN or now_s < self._next_ping_s:
            return
        self._next_ping_s = now_s + PING_S
        self._silent_pings += 1
        if self._silent_pings <= max_silent_pings(self._timeouts.control_s):
            self._write(encode_frame({"op": "ping"}))
        else:
            self._on_broken("silent")

    def _write(self, frame: bytes) -> None:
        self._outbox.add(frame)
        self._flush()

    def _flush(self) -> None:
        """Sends what the socket takes now. One that is broken shows it in the next turn, as readable."""
        if self._socket is None or self._phase is _Phase.CONNECTING:
            return
        try:
            self._outbox.send(self._socket)
        except OSError:
            self._outbox = Outbox()
        writing = selectors.EVENT_WRITE if self._outbox else 0
        if self._selector.get_key(self._socket).events != selectors.EVENT_READ | writing:
            on_ready = partial(self._on_ready, self._socket)
            self._selector.modify(self._socket, selectors.EVENT_READ | writing, on_ready)

    def _end_lookup(self) -> None:
        if self._lookup is not None:
            self._selector.unregister(self._lookup)
            self._lookup.close()
            self._lookup = None

    def _disconnect(self) -> None:
        self._end_lookup()
        if self._socket is not None:
            if self._socket in self._selector.get_map():
                self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None
        self.is_open = False
        self._phase, self._reader, self._outbox = _Phase.CONNECTING, FrameReader(), Outbox()
