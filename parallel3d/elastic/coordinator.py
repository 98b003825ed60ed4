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
from parallel3d.elastic.announce import Chronicle
from parallel3d.elastic.control import encode_frame
from parallel3d.elastic.membership import EpochRecord, Loss, Report
from parallel3d.elastic.overdue import OverdueRule, Pace, Survey
from parallel3d.elastic.pinboard import OPS as PINBOARD_OPS
from parallel3d.elastic.pinboard import Pinboard
from parallel3d.elastic.protocol import Action, Commit, Depart, Halt, Open, Protocol, Release, Seal, Stay
from parallel3d.elastic.pulse import plan_patience
from parallel3d.elastic.succession import GuardianPlace, Roster, may_serve
from parallel3d.elastic.switchboard import Peer, Switchboard
from parallel3d.elastic.verdict import Outcome, RunBook, describe_error
from parallel3d.errors import EXIT_COORDINATOR_LOST, LaunchError, ProtocolError
from parallel3d.topology.grid import Grid

TICK_S = 0.25
FAREWELL_S = 2.0
GATHER_DEPARTURES_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long each wait of the launching side may last, in seconds."""

    start_s: float = 600.0
    """From the coordinator's start until every worker has connected; also the longest look-up of its address."""
    connect_s: float = 60.0
    """Until the coordinator accepts a connection."""
    muster_s: float = 5.0
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
    silence: TimeoutConfig
    stuck: TimeoutConfig
    witness: str | None = None
    overdue: OverdueRule | None = None
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
        limits: Limits,
        elastic: ElasticSettings | None = None,
        own: GuardianPlace | None = None,
        values: Mapping[str, bytes] | None = None,
    ):
        self._board = Switchboard(listener, hear=self._hear, lose=self._lose_peer)
        self._pinboard = Pinboard(values or {}, send=self._board.send)
        self._emit = emit
        self._limits = limits
        self._elastic = elastic
        self._own = own
        """The guardian in whose process it is."""
        self._book = RunBook(world_size)
        self._protocol: Protocol | None = None
        if elastic:
            self._book.note_grid(elastic.grid)
            self._protocol = self._make_protocol(elastic)
            self._chronicle = Chronicle(elastic.grid)
        self._seal: dict[str, Any] | None = None
        """Of the newest change under way, for workers that connect late."""
        self._sent_off: set[int] = set()
        """Workers that have been told to ask for the change with which they leave."""
        self._watch: dict[str, Any] | None = None
        """The guardians' patience, once it is known."""
        self._aborting = False
        self._last_told: dict[str, int] = {}
        """By kind of record, the newest step told."""
        self._departing: set[int] = set()
        """Workers that are to leave, while others may be named."""
        self._departure_deadline = float("inf")
        self._pace = Pace(elastic.overdue) if elastic and elastic.overdue else None
        self._survey: Survey | None = None
        """Under way."""
        self._start_deadline = time.monotonic() + limits.start_s
        self._thread = threading.Thread(target=self._serve, name="coordinator", daemon=True)

    def start(self) -> None:
        """Starts to serve; call it after the forks, since a thread does not survive one."""
        self._thread.start()

    def join(self, timeout_s: float) -> Outcome:
        """The outcome, once the run is over; what is known of it when that takes longer than `timeout_s`."""
        self._thread.join(timeout_s)
        return self._book.outcome()

    def _make_protocol(self, elastic: ElasticSettings) -> Protocol | None:
        return Protocol(
            elastic.grid, zero_stage=elastic.zero_stage, zero_backups=elastic.zero_backups, enabled=elastic.enabled
        )

    def _serve(self) -> None:
        try:
            self._begin()
            while not self._book.over:
                self._board.turn(max(0.0, min(TICK_S, self._departure_deadline - time.monotonic())))
                self._miss_latecomers()
                self._see_off()
                self._look_for_the_overdue()
            if self._protocol:
                self._emit_all(self._chronicle.close())
            self._tell_guardians({"op": "over", "exit_code": self._book.outcome().exit_code})
            deadline = time.monotonic() + FAREWELL_S
            while self._board.peers and time.monotonic() < deadline:
                self._board.turn(TICK_S)
        finally:  # also after a defect in here: a closed connection ends the run, an open one would hang it
            self._board.close()

    def _begin(self) -> None:
        """What comes before the first turn."""

    def _miss_latecomers(self) -> None:
        if time.monotonic() > self._start_deadline:
            missing = [rank for rank, worker in self._book.workers.items() if not (worker.host or worker.ended)]
            self._book.note_never_came(missing, timeout_s=self._limits.start_s)
            self._start_deadline = float("inf")
            self._abort_after_failure()

    # What they say

    def _hear(self, peer: Peer, header: dict[str, Any], payload: bytes) -> None:
        op = header["op"]
        if op == "hello":
            self._greet(peer, header)
        elif peer.guarded:
            self._hear_guardian(peer, op, header)
        elif peer.rank is not None:
            self._hear_worker(peer, peer.rank, header, payload)
        else:
            raise ProtocolError(f"{op!r} before hello")

    def _greet(self, peer: Peer, header: dict[str, Any]) -> None:
        ranks = tuple(header["ranks"])
        if not ranks or any(rank not in self._book.workers for rank in ranks):
            raise ProtocolError(f"hello from ranks {ranks}")
        gone = all(self._book.workers[rank].ended for rank in ranks)  # evicted before it found this coordinator
        if gone and header["role"] == "worker":
            raise ProtocolError(f"hello from ranks {ranks}, which take part no longer")
        peer.hello = header
        if header["role"] == "guardian":
            peer.guarded = ranks
            self._board.send(peer, {"op": "welcome"})
            if gone:
                self._board.send(peer, {"op": "over", "exit_code": EXIT_COORDINATOR_LOST})
                return
        else:
            (peer.rank,) = ranks
            self._book.note_hello(peer.rank, host=header["host"], log=header["log"])
        self._catch_up(peer)

    def _catch_up(self, peer: Peer) -> None:
        """Whoever comes late learns what the others have been told."""
        if self._book.stop_signal is not None:
            self._board.send(peer, {"op": "stop"})
        if self._seal and peer.rank is not None:
            self._board.send(peer, self._seal)
        if peer.rank in self._sent_off:
            self._board.send(peer, {"op": "depart"})
        if self._watch and peer.guarded:
            self._board.send(peer, self._watch)
        if self._protocol and self._protocol.committed and peer.guarded:
            self._send_roster(self._protocol.committed)
        if self._aborting:
            self._board.send(peer, self._abort_frame(self._limits.abort_grace_s))

    def _hear_guardian(self, peer: Peer, op: str, header: dict[str, Any]) -> None:
        if op == "ended":
            self._note_ends(header["ends"])
        elif op == "stop":
            self._stop(header["signal"], at_once=header["at_once"])
        elif op == "leave":
            self._note_departure(peer.guarded)
        elif op == "where":
            self._begin_survey("where everybody is:")

    def _hear_worker(self, peer: Peer, rank: int, header: dict[str, Any], payload: bytes) -> None:
        match header["op"]:
            case "publish":
                self._publish(rank, header["record"])
            case op if op in PINBOARD_OPS:
                self._pinboard.heed(peer, header, payload)
            case "error":
                self._book.note_error(rank, header["error"])
                self._abort_after_failure()
            case "leave":
                self._note_departure([rank])
            case "finish":
                self._board.send(peer, {"op": "bye"})
            case "whereabouts":
                if self._survey:
                    self._survey.note(rank, header["told"])
            case "report" | "confirm" | "suspect" | "finish_epoch" if self._protocol:
                self._hear_member(self._protocol, rank, header)
            case _ if self._aborting:
                return
            case op:
                raise ProtocolError(f"rank {rank} sent {op!r}")

    def _hear_member(self, protocol: Protocol, rank: int, header: dict[str, Any]) -> None:
        """A worker's word on membership. One that can't be is a defect: it ends the run."""
        try:
            match header["op"]:
                case "report":
                    report = Report.from_json(header["report"])
                    self._chronicle.note_report(rank, report.position)
                    self._act(protocol.report(report))
                case "confirm":
                    self._chronicle.note_confirm(rank, header["moved_bytes"])
                    self._act(protocol.confirm(rank, header["epoch"], header["digest"]))
                case "suspect":
                    self._act(protocol.suspect(rank, header["epoch"], header["reason"]))
                case "finish_epoch":
                    self._act(protocol.finish(rank, header["epoch"]))
        except ProtocolError as error:
            self._book.note_error(rank, describe_error(error))
            self._abort_after_failure()

    def _publish(self, rank: int, record: dict[str, Any]) -> None:
        """Passes a record on to the report. A new leader repeats what the old one may not have told."""
        if self._pace:
            self._pace.note(record, time.monotonic())
        match record:
            case {"kind": "step" | "evaluation" as kind, "step": int(step)}:
                if step <= self._last_told.get(kind, -1):
                    return
                self._last_told[kind] = step
            case {"kind": "round_trip", "seconds": seconds}:
                self._decide_patience(seconds)
                return
            case {"kind": "resumed", "epoch": epoch, "regroup_s": regroup_s, "plan": plan}:
                self._emit_all(self._chronicle.note_resumed(epoch, regroup_s=regroup_s, plan=plan))
                return
        self._book.note_record(rank, record)
        self._emit(record)
        if self._protocol and record.get("kind") == "step":
            self._protocol.last_told = record["step"]
            self._emit_all(self._chronicle.note_step(record.get("step_s", 0.0)))

    # Where everybody is

    def _look_for_the_overdue(self) -> None:
        now_s = time.monotonic()
        overdue_s = self._pace.overdue_s(now_s) if self._pace and not self._aborting else None
        if self._pace and overdue_s is not None:
            last_step = self._book.last_step or 0
            what = f"the evaluation after step {last_step}" if self._pace.evaluates else f"step {last_step + 1}"
            self._begin_survey(f"{what} is overdue: nothing has come for {overdue_s:.1f} s (stacks: logs/)")
        if self._survey and self._survey.is_over(now_s):
            self._notice(self._survey.table())
            self._survey = None

    def _begin_survey(self, why: str) -> None:
        """Asks every worker where it is; their guardians make them write their stacks into their logs."""
        places = {rank: worker.coordinates for rank, worker in self._book.workers.items()}
        self._survey = Survey(why, sorted(self._live), places, time.monotonic())
        self._tell(self._live, {"op": "where"})
        self._tell_guardians({"op": "where"})

    # Who takes part

    def _note_ends(self, ends: Iterable[dict[str, Any]]) -> None:
        """What waitpid has told a guardian, of one or more workers."""
        losses, detect_s = [], []
        for end in ends:
            rank, exit_code, by_guardian = end["rank"], end["exit_code"], end["by_guardian"]
            if self._book.workers[rank].ended:  # a guardian tells a new coordinator what it has told the old one
                continue
            self._book.note_step(rank, end["step"])
            if exit_code < 0 and not by_guardian and self._can_lose:
                losses.append(self._book.death_by_signal(rank, -exit_code, because=end["why"]))
                detect_s += [] if end["detect_s"] is None else [end["detect_s"]]
            elif exit_code == 0 and self._can_lose and self._book.is_needed(rank):
                self._book.note_early_end(rank)
            else:
                self._book.note_end(rank, exit_code=exit_code, by_guardian=by_guardian)
        self._lose(losses, detect_s=detect_s)
        self._abort_after_failure()

    def _lose_peer(self, peer: Peer) -> None:
        """A connection broke: a guardian takes its workers along, a worker's own end is told by its guardian."""
        losses = [self._book.death_with_guardian(rank) for rank in peer.guarded if not self._book.workers[rank].ended]
        if losses and self._can_lose and (reason := self._lacks_quorum()):
            self._book.note_lost_quorum(reason)
        if self._can_lose:
            self._lose(losses)
        else:
            for loss in losses:
                self._book.note_fatal_loss(loss)
        self._abort_after_failure()

    def _lacks_quorum(self) -> str:
        """Why this coordinator may serve no longer; "" when it may. Half of the hosts will do for the one in office."""
        committed = self._protocol.committed if self._protocol else None
        if committed is None or self._own is None:  # nobody can take over
            return ""
        hosts = {committed.hosts[rank] for rank in committed.members}
        reached = {peer.hello["host"] for peer in self._board.guardians()}
        return may_serve(reached, hosts, take_witness=lambda: "").reason

    @property
    def _can_lose(self) -> bool:
        """The protocol has a say in what follows from a loss."""
        return self._protocol is not None and not self._aborting

    def _lose(self, losses: Sequence[Loss], *, detect_s: Sequence[float] = ()) -> None:
        if losses and self._protocol:
            for loss in losses:
                self._book.note_survived_loss(loss)
            self._act(self._protocol.lose(losses), detect_s=detect_s)

    def _act(self, actions: Iterable[Action], *, detect_s: Sequence[float] = ()) -> None:
        """Carries out what the protocol has decided."""
        for action in actions:
            match action:
                case Seal():
                    self._emit_all(self._chronicle.begin(time.monotonic(), detect_s=detect_s))
                    self._seal = {"op": "seal", "epoch": action.epoch, "reason": action.reason}
                    self._tell(action.ranks, self._seal)
                case Open():
                    self._tell(action.record.members, {"op": "record", "record": action.record.to_json()})
                    self._chronicle.note_record(action.record, time.monotonic())
                case Commit():
                    self._tell(action.members, {"op": "go", "epoch": action.epoch})
                    self._chronicle.note_commit(time.monotonic())
                    self._book.note_done(set(action.members) - self._live)
                    self._seal = None
                    assert self._protocol is not None and self._protocol.committed is not None
                    self._send_roster(self._protocol.committed)
                    self._pinboard.forget_epochs_before(action.epoch)
                case Depart():
                    self._sent_off.add(action.rank)
                    self._tell([action.rank], {"op": "depart"})
                case Stay():
                    name = self._book.name(action.rank)
                    self._notice(f"{name} is to leave, but the run can't go on without it: {action.reason}")
                    self._stop(signal.SIGTERM, at_once=False)
                case Release():
                    self._tell(action.ranks, {"op": "release"})
                    self._book.note_done(action.ranks)
                case Halt():
                    self._book.note_halt(action.reason)
                    self._abort_after_failure()

    def _note_departure(self, ranks: Iterable[int]) -> None:
        """Workers that have to go soon. A host tells all of its own within moments: decide on them together."""
        if not self._departing:
            self._departure_deadline = time.monotonic() + GATHER_DEPARTURES_S
        self._departing.update(ranks)

    def _see_off(self) -> None:
        """Lets go those that are to leave; stops the run when the rest could not go on, or when that is nobody."""
        everybody = self._departing >= self._live
        if not self._departing or not (everybody or time.monotonic() >= self._departure_deadline):
            return
        departing, self._departing, self._departure_deadline = self._departing, set(), float("inf")
        if everybody or self._protocol is None:
            self._stop(signal.SIGTERM, at_once=False)
            return
        for rank in sorted(departing):
            self._act(self._protocol.ask_to_leave(rank))

    @property
    def _live(self) -> frozenset[int]:
        if self._protocol:
            return self._protocol.live
        return frozenset(rank for rank, worker in self._book.workers.items() if not worker.ended)

    def _decide_patience(self, round_trip_s: float) -> None:
        if self._elastic and not self._watch:
            patience = plan_patience(self._elastic.silence, self._elastic.stuck, round_trip_s)
            self._watch = {"op": "watch", "silence_s": patience.silence_s, "stuck_s": patience.stuck_s}
            self._tell_guardians(self._watch)
            self._notice(
                f"timeouts: silence {patience.silence_s:.2f} s, stuck {patience.stuck_s:.0f} s "
                f"(round trip {round_trip_s * 1e3:.2f} ms)"
            )

    # How the run ends

    def _stop(self, signal_number: int, *, at_once: bool) -> None:
        if self._book.stop_signal is None and not self._aborting:
            self._book.note_stop(signal_number)
            self._notice("stopping after this step; press Ctrl-C again to stop at once")
            self._tell_all({"op": "stop"})
        if at_once:
            self._aborting = True
            self._tell_all(self._abort_frame(0.0))

    def _abort_after_failure(self) -> None:
        """What the run can't survive ends it: everybody is told, once."""
        if self._book.failures and not self._aborting:
            self._aborting = True
            self._emit({"event": "failure", "text": self._book.failures[0].message})
            self._tell_all(self._abort_frame(self._limits.abort_grace_s))

    def _abort_frame(self, grace_s: float) -> dict[str, Any]:
        reason = self._book.failures[0].message if self._book.failures else "stopped at once"
        return {"op": "abort", "reason": reason, "grace_s": grace_s}

    # Telling

    def _tell(self, ranks: Iterable[int], header: dict[str, Any]) -> None:
        frame, workers = encode_frame(header), self._board.workers()
        for rank in ranks:
            if rank in workers:
                self._board.send_encoded(workers[rank], frame)

    def _tell_all(self, header: dict[str, Any]) -> None:
        for peer in list(self._board.peers):
            if peer.guarded or peer.rank is not None:
                self._board.send(peer, header)

    def _tell_guardians(self, header: dict[str, Any]) -> None:
        for peer in self._board.guardians():
            self._board.send(peer, header)

    def _send_roster(self, committed: EpochRecord) -> None:
        """Tells all guardians whom to turn to if this process is lost."""
        if self._own is None:
            return
        places = [GuardianPlace.from_json(peer.hello) for peer in self._board.guardians()]
        roster = Roster(
            coordinator=self._own,
            guardians=tuple(sorted(places, key=lambda place: place.ranks)),
            hosts=tuple(sorted({committed.hosts[rank] for rank in committed.members})),
        )
        self._tell_guardians({"op": "roster", "roster": roster.to_json()})

    def _notice(self, text: str) -> None:
        self._emit({"kind": "notice", "text": text})

    def _emit_all(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            self._emit(record)
