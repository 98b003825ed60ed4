"""The worker's end of the membership protocol.

Two threads meet here. The control channel's reader calls `handle` for each of the coordinator's frames, in order, and
aborts the generation's token the moment an `abort_generation` arrives, so that a worker leaves its step while its main
thread still waits for a peer. The main thread calls the rest, and waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from parallel3d.elastic.protocol.membership import NO_GENERATION, Address, GenerationRecord, StateReport
from parallel3d.elastic.protocol.record_delta import decode_record, encode_record
from parallel3d.errors import GenerationEnded, RunEnded
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import PartId

FRAMES = (
    "abort_generation",
    "fetch_entries",
    "fetch_committed",
    "entries",
    "record",
    "commit",
    "change_request",
    "build_part",
    "finish_run",
)
FIRST_GENERATION = 0


class Send(Protocol):
    """Passes a frame to the coordinator without waiting."""

    def __call__(self, header: dict[str, Any], payload: bytes = b"", /) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PendingGeneration:
    """A generation that is agreed but not yet confirmed; `token` is aborted when it is over."""

    record: GenerationRecord
    entries: bytes = b""
    """The entries up to the record's position, if this worker lacks them."""
    token: AbortToken


class MembershipClient:
    """Takes part in changes of membership for one worker.

    `run_token` is aborted when the run is over. All waits raise RunEnded then. A worker that joins a run reports to the
    first change that it hears of, all others to the first generation at once. `part`: of the model, if it is to build
    one.
    """

    def __init__(
        self, *, rank: int, send: Send, run_token: AbortToken, joins: bool = False, part: PartId | None = None
    ):
        self.rank = rank
        self._send = send
        self._run_token = run_token
        self._changed = threading.Condition()
        self._newest_generation = NO_GENERATION if joins else FIRST_GENERATION
        """The newest change of membership; the first one is never announced."""
        self._reason = "the run begins"
        self._reported_generation = NO_GENERATION
        self._entries = b""
        """Those of its last report."""
        self._missing_entries: dict[int, bytes] = {}
        """Those that another worker holds, by the generation that they are for."""
        self._pending: PendingGeneration | None = None
        self._committed_generation = NO_GENERATION
        self._committed_record: GenerationRecord | None = None
        self._requested_generation = NO_GENERATION
        """The newest generation in which this worker was asked to request a change."""
        self._part = part
        self._moves_to: PartId | None = None
        """The part that this worker, a spare that has built another one, is to build instead."""
        self._is_ready = not joins
        self._is_finished = False
        self._is_drained = False
        """The run goes on without this worker, which it did not need."""
        run_token.on_abort(self._end)

    def await_part(self) -> PartId | None:
        """Waits until the run needs this spare; returns the part of the model to build. None: it does not, leave."""
        self._await(lambda: self._is_finished or self._part is not None)
        return None if self._is_finished else self._part

    def take_move(self) -> PartId | None:
        """Returns the part of the model that this spare is to build instead of its own, if any. It is not a member
        from then on until it has announced that it is ready."""
        with self._changed:
            part, self._moves_to = self._moves_to, None
            if part is None or self._is_finished:
                return None
            self._part, self._is_ready = part, False
            return part

    def announce_ready(self) -> None:
        """Announces, if this worker joins a run, that it can enter with the next change."""
        with self._changed:
            was_ready, self._is_ready = self._is_ready, True
        if not was_ready:
            self._send({"op": "ready"})

    def next_generation(
        self, make_report: Callable[[int], StateReport], *, suspicion: str = ""
    ) -> PendingGeneration | None:
        """Reports to the newest change of membership and waits for its record; None: the run is done, leave, or build
        another part (`take_move`).

        `make_report(generation)` is called again when a further loss restarts the change. With `suspicion` (why the
        caller has left its generation) a change is requested if none is under way; without, the call waits for one, as
        a spare does.
        """
        with self._changed:
            nothing_new = self._newest_generation == self._reported_generation
        if suspicion and nothing_new:
            self._send({"op": "suspect", "generation": self._reported_generation, "reason": suspicion})
        while True:
            self._await(
                lambda: (
                    self._is_finished
                    or self._moves_to is not None
                    or self._newest_generation > self._reported_generation
                )
            )
            if self._is_finished or self._moves_to is not None:
                return None
            generation = self._newest_generation
            report = make_report(generation)
            self._entries, self._reported_generation = report.entries, generation
            self._send({"op": "report", "report": report.to_json()})
            if pending := self._await_record(generation):
                return pending

    def confirm(self, generation: int, *, digest: str, moved_bytes: int) -> None:
        """Confirms that this worker holds all its state, and waits until all members have confirmed.

        `digest` is that of its plan: all ranks of the grid must have the same (a spare sends ""). Raises
        GenerationEnded if a further change begins before all have confirmed.
        """
        self._send({"op": "confirm", "generation": generation, "digest": digest, "moved_bytes": moved_bytes})
        self._await(lambda: self._committed_generation >= generation or self._newest_generation > generation)
        if self._committed_generation < generation:
            raise GenerationEnded(self._reason)

    def finish(self) -> None:
        """Waits until every worker of the grid is done; raises GenerationEnded if one is lost before."""
        generation = self._committed_generation
        self._send({"op": "finish_generation", "generation": generation})
        self._await(lambda: self._is_finished or self._newest_generation > generation)
        if not self._is_finished:
            raise GenerationEnded(self._reason)

    def handle(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Handles a frame from the coordinator, one of `FRAMES`; called on the channel's reader thread."""
        if self._answer(header):
            return
        with self._changed:
            match header["op"]:
                case "abort_generation":
                    self._newest_generation, self._reason = header["generation"], header["reason"]
                case "entries":
                    self._missing_entries = {header["generation"]: payload}
                case "record":
                    token = AbortToken()
                    token.on_wait = self._run_token.on_wait
                    self._pending = PendingGeneration(
                        record=decode_record(payload, self._committed_record),
                        entries=self._missing_entries.get(header["generation"], b""),
                        token=token,
                    )
                case "commit":
                    assert self._pending is not None
                    self._committed_generation, self._committed_record = header["generation"], self._pending.record
                case "change_request":
                    self._requested_generation = header["generation"]
                case "build_part":
                    part = (header["part"][0], header["part"][1])
                    self._part, self._moves_to = (self._part, part) if self._is_ready else (part, None)
                case "finish_run":
                    self._is_finished, self._is_drained = True, header.get("is_drained", False)
            self._changed.notify_all()
        if header["op"] == "abort_generation":
            self.leave_generation(header["reason"])
        elif self._run_token.aborted:  # just before the record came: its generation is over before it begins
            self.leave_generation(self._run_token.reason)

    @property
    def is_building(self) -> bool:
        """Whether this worker is to join the run and is not ready: it may end without a word."""
        return self._part is not None and not self._is_ready

    @property
    def change_requested(self) -> bool:
        """True while this worker should request a change at a step boundary."""
        return self._requested_generation == self._committed_generation != NO_GENERATION

    def addresses(self) -> dict[int, Address]:
        """Returns where the members of the newest record listen."""
        with self._changed:
            return dict(self._pending.record.addresses) if self._pending else {}

    def _answer(self, header: dict[str, Any]) -> bool:
        """Answers a frame that changes nothing here; returns False if it is another one."""
        match header:
            case {"op": "fetch_entries", "generation": generation}:
                self._send({"op": "entries", "generation": generation}, self._entries)
            case {"op": "fetch_committed"} if self._committed_record is not None:
                self._send({"op": "committed"}, encode_record(self._committed_record, None))
            case {"op": "record", "generation": generation, "base": int(base)} if base != self._committed_generation:
                self._send({"op": "request_record", "generation": generation})
            case _:
                return False
        return True

    @property
    def permission(self) -> str:
        """Why this worker may end: the run is "finished", or it is "drained"; "" if it may not."""
        if self._is_finished:
            return "drained" if self._is_drained else "finished"
        record = self._committed_record
        return "drained" if record is not None and self.rank in record.draining else ""

    def membership_state(self) -> dict[str, Any]:
        """Returns what a new coordinator must know of this worker."""
        with self._changed:
            return {
                "newest_generation": self._newest_generation,
                "committed_generation": self._committed_generation,
                "part": self._moves_to or self._part,
                "is_ready": self._is_ready and self._moves_to is None,
            }

    def leave_generation(self, reason: str) -> None:
        """Ends all waits of the generation."""
        if pending := self._pending:
            pending.token.abort(reason)

    def _await_record(self, generation: int) -> PendingGeneration | None:
        """Returns the agreed generation; None if a further change has begun instead."""
        self._await(lambda: self._newest_generation > generation or self._proposed_generation == generation)
        return self._pending if self._newest_generation == generation else None

    @property
    def _proposed_generation(self) -> int:
        return self._pending.record.generation if self._pending else NO_GENERATION

    def _await(self, ready: Callable[[], bool]) -> None:
        with self._run_token.waiting("the coordinator"), self._changed:
            self._changed.wait_for(lambda: ready() or self._run_token.aborted)
        if not ready():
            raise RunEnded(self._run_token.reason)

    def _end(self) -> None:
        """Ends all waits: the run is over."""
        with self._changed:
            self._changed.notify_all()
        self.leave_generation(self._run_token.reason)
