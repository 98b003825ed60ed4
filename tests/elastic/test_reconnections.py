"""A guardian whose path to the coordinator was cut for less than the coordinator's patience connects once more.

The coordinator still has its earlier connection, which looks alive. What was said meanwhile is lost, so its workers are
lost, too; the others go on, and the host comes back like one that was cut off for longer.
"""

from __future__ import annotations

import pytest

from parallel3d.elastic.coordinator.coordinator import Coordinator
from parallel3d.elastic.coordinator.listener import open_listener
from parallel3d.elastic.frames import FrameReader, encode_frame, encode_from_workers
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.parallel.grid import Grid
from tests.elastic.test_control_channel import send
from tests.elastic.test_coordinator import begin, report_of
from tests.support.coordinator_threads import ServingThread
from tests.support.run_secrets import SECRET, open_connection


class World:
    """A coordinator of two workers, each with a guardian on a host of its own."""

    def __init__(self, elastic):
        listener = open_listener("127.0.0.1", 0)
        self.address = ("127.0.0.1", listener.getsockname()[1])
        self.records: list[dict] = []
        self.serving = ServingThread(
            Coordinator(
                listener,
                secret=SECRET,
                world_size=2,
                emit=self.records.append,
                timeouts=LaunchTimeouts(),
                elastic=elastic,
            )
        )

    def guardian(self, rank: int):
        address = [f"10.0.0.{rank}", 1]
        hello = {"op": "hello", "role": "guardian", "ranks": [rank], "host": f"host{rank}", "address": address}
        return open_connection(self.address, hello)

    def worker(self, rank: int) -> ControlChannel:
        hello = {"op": "hello", "role": "worker", "ranks": [rank], "host": f"host{rank}", "log": ""}
        return ControlChannel(open_connection(self.address, hello), rank=rank, world_size=2)

    def finish(self, last: ControlChannel, gone: ControlChannel, staying, other) -> None:
        """Ends the run with the worker that is left, rank 0: it is right."""
        last.membership.finish()
        assert last.membership.next_generation(report_of(last)) is None
        last.finish(0)
        send(staying, op="ended", ends=[_end(0, 0)])
        for connection in (other, staying):
            connection.close()
        gone.finish(0)
        assert self.serving.join(5).exit_code == 0


@pytest.fixture
def world(elastic_settings):
    world = World(elastic_settings(Grid.uniform(tp_size=1, pp_size=1, dp_size=2)))
    yield world
    world.serving.join(5)


def ops_until_closed(connection) -> list[dict]:
    """All frames of the coordinator but pings, to the end of the connection."""
    connection.settimeout(10)
    reader, found = FrameReader(), []
    while data := connection.recv(10_000):
        found += [header for header, _ in reader.feed(data) if header["op"] != "ping"]
    return found


def test_a_guardian_that_connects_again_has_lost_its_workers_and_the_others_go_on(world):
    staying, leaving = world.guardian(0), world.guardian(1)
    first, second = world.worker(0), world.worker(1)
    begin(first, second)
    again = world.guardian(1)
    hello = {"op": "hello", "role": "worker", "ranks": [1], "host": "host1", "log": ""}
    again.sendall(encode_from_workers([(1, encode_frame(hello))]))  # its worker has left its generation
    pending = first.membership.next_generation(report_of(first, 0))
    assert (pending.record.generation, pending.record.members) == (1, (0,))
    assert pending.record.evicted[0].why.endswith("its guardian on host1 is gone")
    first.membership.confirm(1, digest="d", moved_bytes=0)
    assert "over" not in [each["op"] for each in ops_until_closed(leaving)]
    again.settimeout(10)
    reader, found = FrameReader(), []
    while "over" not in [header["op"] for header in found]:
        found += [header for header, _ in reader.feed(again.recv(10_000))]
    over = next(header for header in found if header["op"] == "over")
    assert over["exit_code"] == 4 and "its guardian on host1 is gone" in over["why"]
    world.finish(first, second, staying, again)


def test_a_worker_that_has_lost_the_coordinator_costs_itself_alone(world):
    staying, leaving = world.guardian(0), world.guardian(1)
    first, second = world.worker(0), world.worker(1)
    begin(first, second)
    send(leaving, op="ended", ends=[_end(1, 4)])
    pending = first.membership.next_generation(report_of(first, 0))
    assert (pending.record.generation, pending.record.members) == (1, (0,))
    assert "ended with exit code 4" in pending.record.evicted[0].why
    first.membership.confirm(1, digest="d", moved_bytes=0)
    world.finish(first, second, staying, leaving)


def _end(rank: int, exit_code: int) -> dict:
    end = {"rank": rank, "exit_code": exit_code, "by_guardian": False, "why": "", "detect_s": None, "step": 6}
    return {**end, "permission": "finished" if exit_code == 0 else ""}
