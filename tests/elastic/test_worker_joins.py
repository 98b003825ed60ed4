"""Workers on their way into the run, without processes: who is asked to build what, and how long it may take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.run_status import RunStatus
from parallel3d.elastic.coordinator.worker_joins import WorkerJoins
from parallel3d.elastic.protocol.actions import ChangeRequest
from parallel3d.errors import OutOfPlaceError
from tests.support.protocol_steps import agree, on_lost, started, uniform

BUILD_S = 10.0
LATE = "not ready to join within 10 s"


class SentFrames:
    """A server without connections, which keeps what it is to send."""

    def __init__(self) -> None:
        self.to_guardians: list[dict[str, Any]] = []
        self.to_workers: list[tuple[list[int], dict[str, Any]]] = []

    def send(self, connection: Connection, header: dict[str, Any]) -> None:
        self.to_guardians.append(header)

    def send_to_workers(self, ranks: Iterable[int], header: dict[str, Any]) -> None:
        self.to_workers.append((list(ranks), header))


class Run:
    """Two stages of two replicas, of which stage 1 has lost one; ranks from 4 on are spares."""

    def __init__(self, num_spares: int = 0):
        grid = uniform(2, 2)
        self.protocol = started(grid)
        self.status = RunStatus(4 + num_spares, grid)
        for rank in self.status.workers:
            self.status.record_hello(rank, host=f"host{rank}", log="")
        self.sent = SentFrames()
        self.joins = WorkerJoins(cast(ConnectionServer, self.sent), self.status, grid, build_s=BUILD_S)
        on_lost(self.protocol, 3)
        self.status.workers[3].ended = True
        agree(self.protocol)

    def offer(self, host: str, now_s: float) -> None:
        self.joins.offer(Connection(hello={"role": "guardian", "host": host}), 3)
        self.joins.accept(self.protocol, now_s)

    @property
    def started(self) -> list[int]:
        """The workers that guardians were asked to start."""
        return [frame["rank"] for frame in self.sent.to_guardians]


def test_a_worker_that_is_late_must_end_and_another_one_is_started():
    run = Run()
    run.offer("host3", 100.0)
    run.offer("host5", 105.0)
    assert run.started == [4], "one part is missing, which the first one builds"
    assert run.joins.overdue(100.0 + BUILD_S) == {} and run.joins.is_waiting(4)
    assert run.joins.overdue(100.1 + BUILD_S) == {4: LATE} and not run.joins.is_waiting(4)
    assert run.joins.overdue(1e6) == {}, "once"
    run.joins.accept(run.protocol, 111.0)
    assert run.started == [4, 5]
    assert [frame["part"] for frame in run.sent.to_guardians] == [[1, 0]] * 2
    assert run.joins.admit(4, run.protocol) == [], "it was ready before it was killed, and still comes too late"
    assert run.joins.admit(5, run.protocol) == [ChangeRequest(rank=0, generation=1)]
    assert run.joins.overdue(1e6) == {}, "one that is ready may wait for as long as it takes"
    run.protocol.suspect(0, 1, "a worker joins")
    assert agree(run.protocol, 3).joiners == (5,)


def test_a_spare_has_as_long_from_when_it_is_asked():
    run = Run(num_spares=1)
    assert run.joins.add_spare(4)
    assert run.joins.overdue(1e6) == {} and run.joins.is_waiting(4), "until then it has no deadline"
    run.joins.accept(run.protocol, 200.0)
    assert run.sent.to_workers == [([4], {"op": "build_part", "part": [1, 0]})]
    assert run.joins.overdue(200.0 + BUILD_S) == {} != run.joins.overdue(200.1 + BUILD_S)


@pytest.mark.parametrize("how", ["it ends", "it leaves", "the run is over"])
def test_one_that_is_gone_is_not_late(how: str):
    run = Run()
    run.offer("host3", 100.0)
    match how:
        case "it ends":
            run.status.workers[4].ended = True
            run.joins.accept(run.protocol, 101.0)
        case "it leaves":
            run.joins.dismiss([4])
        case "the run is over":
            assert run.joins.take_building() == [4]
    assert run.joins.overdue(1e6) == {}


def test_another_coordinator_gives_it_as_long_again():
    run = Run()
    run.status.add_worker(4, host="host4", coordinates="")
    assert run.joins.resume(4, (1, 0), 300.0) and not run.joins.resume(4, (1, 0), 305.0)
    assert run.joins.overdue(300.0 + BUILD_S) == {} != run.joins.overdue(300.1 + BUILD_S)


def test_a_worker_that_nobody_asked_is_refused():
    run = Run()
    with pytest.raises(OutOfPlaceError, match="rank 4 was not asked to join"):
        run.joins.admit(4, run.protocol)
