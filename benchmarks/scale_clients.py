"""All guardians and workers of a large run in one thread, for scale.py: sockets and answers, no state."""

from __future__ import annotations

import random
import selectors
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.scale_groups import GroupTalk, Turn
from parallel3d.elastic.frames import (
    PING_S,
    FrameReader,
    encode_frame,
    encode_from_guardians,
    encode_from_workers,
    set_socket_options,
)
from parallel3d.elastic.protocol.failover import GuardianInfo
from parallel3d.elastic.protocol.membership import (
    NO_GENERATION,
    Address,
    GenerationRecord,
    LogPosition,
    StateReport,
    digest_entries,
)
from parallel3d.elastic.protocol.record_delta import decode_record, encode_record
from parallel3d.handshake import connect_handshake
from parallel3d.parallel.grid import Grid
from parallel3d.trainer.entry import Entry
from parallel3d.trainer.entry_codec import encode_entries

CHUNK_BYTES = 2**18
NUM_TOKENS_READ = 3_000_000
"""Of a lane, about: a cursor is a document and a position in it."""


@dataclass(eq=False)
class Wire:
    """One connection with the coordinator: a guardian's, or of the relay of several."""

    socket: socket.socket
    is_relay: bool
    reader: FrameReader = field(default_factory=FrameReader)
    guardians: list[Guardian] = field(default_factory=list)
    frames: list[tuple[int, int | None, bytes]] = field(default_factory=list)
    """What the relay has got in this turn."""

    def flush(self) -> None:
        """Sends what a relay has got, in one frame as a real one does."""
        if self.frames:
            self.socket.sendall(encode_from_guardians(self.frames))
            self.frames = []


@dataclass(eq=False)
class Guardian:
    """One guardian, which relays for its workers."""

    info: GuardianInfo
    wire: Wire
    number: int
    """Its place behind its relay."""
    ranks: set[int] = field(default_factory=set)

    def send(self, frame: bytes) -> None:
        """Sends a frame of its own."""
        if self.wire.is_relay:
            self.wire.frames.append((self.number, None, frame))
        else:
            self.wire.socket.sendall(frame)

    def send_of_workers(self, frames: Sequence[tuple[int, bytes]]) -> None:
        if self.wire.is_relay:
            self.wire.frames += [(self.number, rank, frame) for rank, frame in frames]
        else:
            self.wire.socket.sendall(encode_from_workers(frames))


class Clients:
    """The workers of `grid` and their guardians. Methods return the bytes that the coordinator has sent."""

    def __init__(self, grid: Grid, infos: Iterable[GuardianInfo], *, batch: int, behind: float, relays: bool):
        self._infos = tuple(infos)
        self._has_relays = relays
        self._wires: dict[str, Wire] = {}
        """By host where there are relays, else by the guardian's ranks."""
        self._grid = grid
        self._random = random.Random(1)
        self._ahead = encode_entries([_entry(2, batch, self._random)])
        self._is_behind = {rank: self._random.random() < behind for rank in grid.ranks}
        self._ports = {rank: self._random.randrange(32768, 60999) for rank in grid.ranks}
        self._committed = NO_GENERATION
        self._num_commits = 0
        self._live = set(grid.ranks)
        self._selector = selectors.DefaultSelector()
        self._guardians: dict[int, Guardian] = {}
        self._num_bytes = 0
        self._next_ping_s = 0.0
        self._record_generation = NO_GENERATION
        self._spares: set[int] = set()
        """Live workers whose replica has lost another one."""
        self._joiner: int | None = None
        """The worker that is to take the lost one's place."""
        self._talks: dict[int, Iterator[Turn]] = {}
        """Of workers that build groups: what they have still to say to the key-value store."""
        self._num_answers_due: dict[int, int] = {}

    def start(self, address: Address, secret: bytes) -> int:
        """Connects all and begins generation 0."""
        self._connect(address, secret, self._infos)
        for guardian in self._each_guardian():
            self._report(guardian, 0, sorted(guardian.ranks))
        return self._run_until_committed()

    def lose(self, rank: int) -> int:
        """Reports the death of a worker; ends with the commit of the next generation."""
        self._live.discard(rank)
        self._spares = set(self._grid.tp_ranks(self._grid.coordinates(rank).replica)) - {rank}
        guardian = self._guardians[rank]
        guardian.ranks.discard(rank)
        end = {"rank": rank, "exit_code": -9, "by_guardian": False, "why": "", "detect_s": 0.01, "step": 3}
        end["permission"] = ""
        guardian.send(encode_frame({"op": "ended", "ends": [end]}))
        return self._run_until_committed()

    def build_groups(self, lost: int, *, keeps: bool) -> int:
        """Has the workers build the groups of the generation without `lost`, as if they had its record and not its
        commit. `keeps`: the loss has come between two collectives."""
        self._num_bytes = 0
        grid, _ = self._grid.without([lost])
        talk = GroupTalk(grid, self._grid, generation=self._committed, keeps=keeps)
        self._talks = {rank: talk.turns(rank) for rank in grid.ranks}
        self._num_answers_due = dict.fromkeys(grid.ranks, 0)
        self._talk(grid.ranks)
        while self._talks:
            self._answer_frames()
        return self._num_bytes

    def offer(self, lost: int) -> int:
        """Offers the place of the lost worker; ends with the instruction to start another one there."""
        self._num_bytes = 0
        self._guardians[lost].send(encode_frame({"op": "offer_worker", "slot": 0}))
        while self._joiner is None:
            self._answer_frames()
        self._guardians[self._joiner] = self._guardians[lost]
        self._ports[self._joiner] = self._random.randrange(32768, 60999)
        return self._num_bytes

    def join(self) -> int:
        """Has the new worker say hello, and that it has built its part; ends with the commit of the generation that it
        enters. All ranks of the grid leave theirs at once, after the same entry."""
        assert self._joiner is not None
        guardian = self._guardians[self._joiner]
        guardian.ranks.add(self._joiner)
        self._live.add(self._joiner)
        hello = {"op": "hello", "role": "worker", "host": guardian.info.host, "log": "logs/rank.log"}
        self._send(guardian, [self._joiner], encode_frame({**hello, "ranks": [self._joiner]}))
        self._send(guardian, [self._joiner], encode_frame({"op": "ready"}))
        return self._run_until_committed()

    def take_over(self, address: Address, secret: bytes) -> int:
        """Connects the guardians of all hosts but the first, whose workers hold generation 0."""
        self._committed, self._has_relays = 0, False
        lost = self._infos[0].host
        infos = [info for info in self._infos if info.host != lost]
        self._live -= {rank for info in self._infos if info.host == lost for rank in info.ranks}
        state = {"newest_generation": 0, "committed_generation": 0, "part": None, "is_ready": True}
        self._connect(address, secret, infos, state)
        return self._run_until_committed()

    def _each_guardian(self) -> Iterable[Guardian]:
        return {id(each): each for each in self._guardians.values()}.values()

    def _connect(
        self,
        address: Address,
        secret: bytes,
        infos: Iterable[GuardianInfo],
        membership_state: dict[str, Any] | None = None,
    ) -> None:
        for info in infos:
            name = info.host if self._has_relays else str(info.ranks)
            wire = self._wires[name] = self._wires.get(name) or self._open(address, secret)
            guardian = Guardian(info, wire, number=len(wire.guardians), ranks=set(info.ranks))
            wire.guardians.append(guardian)
            guardian.send(encode_frame({"op": "hello", "role": "guardian", **info.to_json()}))
            self._guardians |= dict.fromkeys(info.ranks, guardian)
            fields = {"op": "hello", "role": "worker", "host": info.host, "log": "logs/rank.log"}
            fields |= {"membership_state": membership_state} if membership_state else {}
            frames = [(rank, encode_frame({**fields, "ranks": [rank]})) for rank in info.ranks]
            guardian.send_of_workers(frames)
            self._flush()

    def _open(self, address: Address, secret: bytes) -> Wire:
        connection = socket.create_connection(address, timeout=60.0)
        set_socket_options(connection)
        connect_handshake(connection, secret)
        connection.settimeout(None)
        if self._has_relays:
            connection.sendall(encode_frame({"op": "hello", "role": "relay"}))
        wire = Wire(connection, self._has_relays)
        self._selector.register(connection, selectors.EVENT_READ, wire)
        return wire

    def _flush(self) -> None:
        for wire in self._wires.values():
            wire.flush()

    def _ping(self) -> None:
        if time.monotonic() > self._next_ping_s:
            self._next_ping_s = time.monotonic() + PING_S
            for wire in self._wires.values():
                wire.socket.sendall(encode_frame({"op": "ping"}))

    def _run_until_committed(self) -> int:
        """Answers frames until all live workers have the next commit."""
        self._num_commits = self._num_bytes = 0
        while self._num_commits < len(self._live):
            self._answer_frames()
        self._committed = self._record_generation
        return self._num_bytes

    def _answer_frames(self) -> None:
        """Answers the frames that have arrived, and pings."""
        self._ping()
        self._flush()
        for key, _ in self._selector.select(1.0):
            wire: Wire = key.data
            data = wire.socket.recv(CHUNK_BYTES)
            assert data, f"the coordinator has closed the connection of {wire.guardians[0].info}"
            self._num_bytes += len(data)
            for header, payload in wire.reader.feed(data):
                if header["op"] == "to_guardians":
                    self._split(wire, header, payload)
                else:
                    self._take(wire.guardians[0], header, payload)
            wire.flush()

    def _split(self, wire: Wire, header: dict[str, Any], payload: bytes) -> None:
        """Passes a frame on to a relay's guardians, or to their workers."""
        if "ranks" not in header:
            ((own, own_payload),) = FrameReader().feed(payload)
            for number in header["guardians"]:
                self._take(wire.guardians[number], own, own_payload)
            return
        ranks: dict[int, list[int]] = {}
        for number, rank in zip(header["guardians"], header["ranks"]):
            ranks.setdefault(number, []).append(rank)
        for number, theirs in ranks.items():
            self._answer(wire.guardians[number], theirs, payload)

    def _take(self, guardian: Guardian, header: dict[str, Any], payload: bytes) -> None:
        """Handles a frame for a guardian."""
        if header["op"] == "to_workers":
            self._answer(guardian, header["ranks"], payload)
        elif header["op"] == "start_worker":
            self._joiner = header["rank"]

    def _answer(self, guardian: Guardian, ranks: list[int], frame: bytes) -> None:
        ((header, payload),) = FrameReader().feed(frame)
        match header["op"]:
            case "change_request":
                self._leave(header["generation"])
            case "abort_generation":
                self._report(guardian, header["generation"], ranks)
            case "fetch_entries":
                answer = {"op": "entries", "generation": header["generation"]}
                self._send(guardian, ranks, encode_frame(answer, self._ahead))
            case "fetch_committed":
                record = encode_record(self._first_record(), None)
                self._send(guardian, ranks, encode_frame({"op": "committed"}, record))
            case "record" if self._joiner in ranks and header["base"] is not None:
                request = encode_frame({"op": "request_record", "generation": header["generation"]})
                self._send(guardian, [self._joiner], request)
                self._answer(guardian, [rank for rank in ranks if rank != self._joiner], frame)
            case "record":
                if self._joiner in ranks:
                    assert len(decode_record(payload, None).grid.ranks) == len(self._grid.ranks)  # it fills the vacancy
                self._record_generation = header["generation"]
                confirm = {"op": "confirm", "generation": header["generation"], "digest": "d" * 16, "moved_bytes": 9}
                self._send(guardian, ranks, encode_frame(confirm))
            case "commit":
                self._num_commits += len(ranks)
            case "response":
                for rank in ranks:
                    self._num_answers_due[rank] -= 1
                self._talk(ranks)

    def _talk(self, ranks: Iterable[int]) -> None:
        """Has those of `ranks` that wait for no answer go on with their talk, in one batch a guardian."""
        frames: defaultdict[Guardian, list[tuple[int, bytes]]] = defaultdict(list)
        for rank in ranks:
            while self._num_answers_due[rank] == 0 and (turn := next(self._talks[rank], None)):
                frames[self._guardians[rank]] += [(rank, frame) for frame in turn.frames]
                self._num_answers_due[rank] = turn.num_answers
            if self._num_answers_due[rank] == 0:
                del self._talks[rank]
        for guardian, theirs in frames.items():
            guardian.send_of_workers(theirs)

    def _leave(self, generation: int) -> None:
        """Has all ranks of the grid leave their generation: the leader's request was in the entry that they hold."""
        reason = {"op": "suspect", "generation": generation, "reason": "a worker leaves or joins"}
        for guardian in self._each_guardian():
            if ranks := sorted(guardian.ranks - self._spares - {self._joiner}):
                self._send(guardian, ranks, encode_frame(reason))

    def _iteration(self, rank: int, generation: int) -> int:
        """The iteration of the worker's newest entry; without a joiner some lack the newest."""
        if generation == 0 or rank == self._joiner:
            return 0
        if self._joiner is None:
            return 1 if self._is_behind[rank] else 2
        return 2 if rank in self._spares else 3

    def _report(self, guardian: Guardian, generation: int, ranks: Iterable[int]) -> None:
        frames = []
        for rank in ranks:
            iteration = self._iteration(rank, generation)
            report = StateReport(
                rank=rank,
                generation=generation,
                state_generation=NO_GENERATION if rank == self._joiner else self._committed,
                position=LogPosition(iteration=iteration),
                digest=digest_entries(self._ahead) if iteration > 1 else "0" * 16,
                version=min(iteration, 1),
                host=guardian.info.host,
                address=(guardian.info.address[0], self._ports[rank]),
            )
            frames.append((rank, encode_frame({"op": "report", "report": report.to_json()})))
        guardian.send_of_workers(frames)

    def _send(self, guardian: Guardian, ranks: list[int], frame: bytes) -> None:
        if ranks:
            guardian.send_of_workers([(rank, frame) for rank in ranks])

    def _first_record(self) -> GenerationRecord:
        return GenerationRecord(
            generation=0,
            grid=self._grid,
            previous=None,
            members=self._grid.ranks,
            hosts={rank: info.host for info in self._infos for rank in info.ranks},
            addresses={rank: (info.address[0], self._ports[rank]) for info in self._infos for rank in info.ranks},
        )


def _entry(iteration: int, batch: int, generator: random.Random) -> Entry:
    cursors = tuple(
        (0, NUM_TOKENS_READ // 700 + generator.randrange(200), generator.randrange(1400)) for _ in range(batch)
    )
    return Entry(
        iteration=iteration,
        squared_norm=1.5,
        finite=True,
        num_target_tokens=batch * 4096,
        loss_sum=3.25 * batch * 4096,
        stop=False,
        leave=False,
        cursors=cursors,
    )
