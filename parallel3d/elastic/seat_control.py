"""The seat of a worker process: what the membership protocol looks like from the worker's end of the control channel.

Two threads meet here. The channel's reader calls `heed` for each frame of the coordinator's, in order, and aborts the
epoch's token the moment a seal arrives, so that a worker leaves its step while its own thread still waits for a peer;
the worker's thread calls the rest, and waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from parallel3d.comm.abort import AbortToken
from parallel3d.elastic.membership import NOTHING, EpochRecord, Report
from parallel3d.elastic.seat import Opening, Seat
from parallel3d.errors import EpochEnded, RunEnded

FRAMES = ("seal", "record", "go", "release")
FIRST_EPOCH = 0


class ControlSeat(Seat):
    """`send` hands a frame to the coordinator without waiting; `run_token` is aborted when the run is over."""

    def __init__(self, *, rank: int, send: Callable[[dict[str, Any]], None], run_token: AbortToken):
        self.rank = rank
        self._send = send
        self._run_token = run_token
        self._changed = threading.Condition()
        self._announced = FIRST_EPOCH
        """The newest change of membership; the first one goes without saying."""
        self._reason = "the run begins"
        self._reported = NOTHING
        self._opening: Opening | None = None
        self._committed = NOTHING
        self._committed_record: EpochRecord | None = None
        self._released = False
        run_token.on_abort(self._end)

    def enter(self, make_report: Callable[[int], Report], *, suspicion: str = "") -> Opening | None:
        with self._changed:
            nothing_new = self._announced == self._reported
        if suspicion and nothing_new:
            self._send({"op": "suspect", "epoch": self._reported, "reason": suspicion})
        while True:
            self._await(lambda: self._released or self._announced > self._reported)
            if self._released:
                return None
            epoch = self._announced
            self._send({"op": "report", "report": make_report(epoch).to_json()})
            self._reported = epoch
            if opening := self._await_record(epoch):
                return opening

    def confirm(self, epoch: int, *, digest: str, moved_bytes: int) -> None:
        self._send({"op": "confirm", "epoch": epoch, "digest": digest, "moved_bytes": moved_bytes})
        self._await(lambda: self._committed >= epoch or self._announced > epoch)
        if self._committed < epoch:
            raise EpochEnded(self._reason)

    def finish(self) -> None:
        epoch = self._committed
        self._send({"op": "finish_epoch", "epoch": epoch})
        self._await(lambda: self._released or self._announced > epoch)
        if not self._released:
            raise EpochEnded(self._reason)

    def heed(self, header: dict[str, Any]) -> None:
        """A frame from the coordinator, one of `FRAMES`; called on the channel's reader."""
        with self._changed:
            match header["op"]:
                case "seal":
                    self._announced, self._reason = header["epoch"], header["reason"]
                case "record":
                    token = AbortToken()
                    token.note_wait = self._run_token.note_wait
                    self._opening = Opening(record=EpochRecord.from_json(header["record"]), token=token)
                case "go":
                    assert self._opening is not None
                    self._committed, self._committed_record = header["epoch"], self._opening.record
                case "release":
                    self._released = True
            self._changed.notify_all()
        if header["op"] == "seal":
            self.leave_epoch(header["reason"])
        elif self._run_token.aborted:  # just before the record came: its epoch is over before it began
            self.leave_epoch(self._run_token.reason)

    def standing(self) -> dict[str, Any]:
        """What a coordinator must know that has not heard of this worker before."""
        with self._changed:
            record = self._committed_record
            return {"announced": self._announced, "committed": record.to_json() if record else None}

    def leave_epoch(self, reason: str) -> None:
        """Ends all waits of the epoch."""
        if opening := self._opening:
            opening.token.abort(reason)

    def _await_record(self, epoch: int) -> Opening | None:
        """The epoch that has been agreed on; None when a further change has begun instead."""
        self._await(lambda: self._announced > epoch or self._opened == epoch)
        return self._opening if self._announced == epoch else None

    @property
    def _opened(self) -> int:
        return self._opening.record.epoch if self._opening else NOTHING

    def _await(self, ready: Callable[[], bool]) -> None:
        with self._run_token.waiting("the coordinator's word"), self._changed:
            self._changed.wait_for(lambda: ready() or self._run_token.aborted)
        if not ready():
            raise RunEnded(self._run_token.reason)

    def _end(self) -> None:
        """The run is over: nothing of its epoch goes on."""
        with self._changed:
            self._changed.notify_all()
        self.leave_epoch(self._run_token.reason)
