"""A failover coordinator in this process, after the loss of host a, and bare connections to it."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any

from parallel3d.elastic.coordinator.failover_coordinator import FailoverCoordinator
from parallel3d.elastic.coordinator.listener import open_listener
from parallel3d.elastic.coordinator.witness import Witness
from parallel3d.elastic.frames import FrameReader, encode_frame
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo
from parallel3d.elastic.protocol.membership import GenerationRecord, LogPosition, LostWorker, StateReport
from parallel3d.elastic.protocol.record_delta import encode_record
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.parallel.grid import Grid
from tests.support.coordinator_threads import ServingThread
from tests.support.run_secrets import SECRET, open_connection

GRID = Grid.uniform(tp_size=1, pp_size=1, dp_size=4)
HOSTS = {rank: host for rank, host in enumerate("abcd")}


def record(generation: int, *lost: int) -> GenerationRecord:
    return GenerationRecord(
        generation=generation,
        grid=GRID.without(lost)[0],
        previous=GRID,
        members=tuple(rank for rank in GRID.ranks if rank not in lost),
        evicted=tuple(LostWorker(rank=rank, why="killed") for rank in lost),
        position=LogPosition(iteration=3),
        hosts=HOSTS,
        last_reported_step=3,
    )


class FakeReport:
    """As far as a coordinator knows one."""

    last_step, last_evaluation = 5, -1

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.publish = self.records.append
        self.num_flushes = 0

    def flush(self) -> None:
        self.num_flushes += 1

    def recorded_preemptions(self) -> dict[str, set[int]]:
        return {}


class World:
    """The failover coordinator after the loss of host a, and bare connections to it."""

    def __init__(self, elastic_settings: Callable[[Grid], ElasticSettings], *, failover_s: float = 5.0):
        listener = open_listener("127.0.0.1", 0)
        self.address = ("127.0.0.1", listener.getsockname()[1])
        self.report = FakeReport()
        self.opened = False
        self.readers: dict[socket.socket, FrameReader] = {}
        self.received: dict[socket.socket, list[dict[str, Any]]] = {}
        self.committed: dict[socket.socket, GenerationRecord] = {}
        self.fetched_from: list[socket.socket] = []
        guardians = tuple(GuardianInfo(ranks=(rank,), host=host, address=self.address) for rank, host in HOSTS.items())
        self.coordinator = FailoverCoordinator(
            listener,
            secret=SECRET,
            failover_plan=FailoverPlan(coordinator=guardians[0], guardians=guardians, hosts=tuple("abcd")),
            witness=Witness(None),
            open_report=self._open,
            world_size=4,
            timeouts=LaunchTimeouts(failover_s=failover_s),
            elastic=elastic_settings(GRID),
            own_info=guardians[1],
        )
        self.serving = ServingThread(self.coordinator)

    def _open(self) -> FakeReport:
        self.opened = True
        return self.report

    def connect(self, **hello: Any) -> socket.socket:
        connection = open_connection(self.address, {"op": "hello", **hello})
        connection.settimeout(5)
        self.readers[connection] = FrameReader()
        return connection

    def guardian(self, rank: int, *ends: dict[str, Any], **more: Any) -> socket.socket:
        connection = self.connect(role="guardian", ranks=[rank], host=HOSTS[rank], address=self.address, **more)
        if ends:
            connection.sendall(encode_frame({"op": "ended", "ends": list(ends)}))
        return connection

    def worker(self, rank: int, committed: GenerationRecord, newest_generation: int) -> socket.socket:
        membership_state = {"newest_generation": newest_generation, "committed_generation": committed.generation}
        membership_state |= {"part": None, "is_ready": True}
        worker = self.connect(role="worker", ranks=[rank], host=HOSTS[rank], log="", membership_state=membership_state)
        self.committed[worker] = committed
        return worker

    def receive(self, connection: socket.socket, until: str) -> list[dict[str, Any]]:
        """Returns the frames that a connection receives up to the first of a kind; workers send their records."""
        received = self.received.setdefault(connection, [])
        while not any(header["op"] == until for header in received):
            readable, _, _ = select.select(list(self.readers), [], [], 5)
            assert readable, f"no {until} after {received}"
            for each in readable:
                self._read(each)
        self.received[connection] = []
        return received

    def _read(self, connection: socket.socket) -> None:
        data = connection.recv(100_000)
        if not data:
            del self.readers[connection]
            return
        for header, payload in self.readers[connection].feed(data):
            if header["op"] == "fetch_committed":
                self.fetched_from.append(connection)
                record = encode_record(self.committed[connection], None)
                connection.sendall(encode_frame({"op": "committed"}, record))
            else:
                self.received.setdefault(connection, []).append({**header, "payload": payload} if payload else header)


def send_report(
    worker: socket.socket, rank: int, generation: int, held: int, iteration: int, *, digest: str = ""
) -> None:
    """Reports to a change for a worker that holds its ranges by the committed generation `held`."""
    report = StateReport(
        rank=rank,
        generation=generation,
        state_generation=held,
        position=LogPosition(iteration=iteration),
        digest=digest,
        host=HOSTS.get(rank, "d"),
    )
    worker.sendall(encode_frame({"op": "report", "report": report.to_json()}))


def end_of(rank: int, exit_code: int, permission: str = "") -> dict[str, Any]:
    end = {"rank": rank, "exit_code": exit_code, "by_guardian": False, "why": "", "detect_s": None, "step": 6}
    return {**end, "permission": permission}
