"""Rounds of probes: when they begin, what they find, whom they evict; workers without a connection."""

from __future__ import annotations

import itertools
import socket
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from parallel3d.elastic.coordinator.fences import BROKEN_CHANNEL_S, Fences
from parallel3d.elastic.coordinator.path_check import ANSWER_S, PROBE_SHARE, QUIET_SHARE, PathCheck
from parallel3d.elastic.coordinator.run_status import RunStatus
from parallel3d.elastic.worker import path_probe
from parallel3d.elastic.worker.path_probe import likely_first, unreachable_ranks

CONTROL_S = 20.0
QUIET_S, PROBE_S = QUIET_SHARE * CONTROL_S, PROBE_SHARE * CONTROL_S


@dataclass
class Sent:
    """A server that keeps what is sent; a guardian for each host of two ranks."""

    probes: list[dict] = field(default_factory=list)
    killed: dict[int, str] = field(default_factory=dict)

    def guardians(self):
        return [SimpleNamespace(guarded_ranks=(2 * host, 2 * host + 1)) for host in range(3)]

    def send(self, connection, header):
        assert all(rank in connection.guarded_ranks for rank, _ in header["ends"])
        self.killed |= dict(header["ends"])

    def send_to_workers(self, ranks, header):
        self.probes.append({**header, "ranks": sorted(ranks)})


class World:
    """Six workers on the hosts a, b, c; the coordinator is on a."""

    def __init__(self):
        self.server, self.status = Sent(), RunStatus(6)
        for rank in range(6):
            self.status.record_hello(rank, host="abc"[rank // 2], log="")
        self.fences = Fences(self.server, self.status)
        self.paths = PathCheck(self.server, self.status, self.fences, control_s=CONTROL_S, own_host="a")
        self.protocol = SimpleNamespace(live=frozenset(range(6)), can_spare=lambda ranks: True)

    def check(self, now_s, progress=1, has_trained=True):
        return self.paths.check(self.protocol, progress, now_s, has_trained=has_trained)

    def begin_round(self) -> int:
        self.check(0.0)
        self.check(QUIET_S)
        return self.server.probes[-1]["round"]


@pytest.fixture
def world():
    return World()


def test_a_round_begins_when_nothing_moves(world):
    for now_s in range(100):  # a step each second
        world.check(float(now_s), progress=now_s)
    assert not world.server.probes
    world.check(99 + 0.9 * QUIET_S, progress=99)
    assert not world.server.probes
    world.check(99 + QUIET_S, progress=99)
    (probe,) = world.server.probes
    assert probe["ranks"] == list(range(6)) and probe["timeout_s"] == PROBE_S


def test_a_cut_path_costs_one_of_its_hosts(world):
    number = world.begin_round()
    world.paths.add(2, number, [4])
    for rank in (0, 1, 3, 4, 5):
        world.paths.add(rank, number, [])
    assert world.check(QUIET_S + PROBE_S) == ""
    assert world.server.killed == {rank: "evicted: b and c can't reach each other" for rank in (4, 5)}


def test_a_round_ends_without_the_answers_of_hanging_workers(world):
    number = world.begin_round()
    world.paths.add(4, number, [2, 3])
    world.check(QUIET_S + PROBE_S)
    assert not world.server.killed
    world.check(QUIET_S + PROBE_S + ANSWER_S)
    assert world.server.killed.keys() == {4, 5}


def test_a_round_in_which_the_run_moves_on_shows_nothing(world):
    number = world.begin_round()
    world.check(QUIET_S + 1, progress=2)
    world.paths.add(4, number, [2, 3])
    world.check(QUIET_S + PROBE_S + ANSWER_S, progress=2)
    assert not world.server.killed


def test_rounds_that_find_nothing_become_rare(world):
    world.check(0.0)
    for now_s in range(1, 2000):
        world.check(float(now_s))
        for rank in range(6):
            world.paths.add(rank, len(world.server.probes), [])
    assert 5 <= len(world.server.probes) <= 10 and not world.server.killed


def test_paths_within_a_host_and_unknown_ranks_are_ignored(world):
    number = world.begin_round()
    for rank in range(6):
        world.paths.add(rank, number, [rank ^ 1, 77])
    assert world.check(QUIET_S + 1) == "" and not world.server.killed


def test_answers_to_another_coordinators_rounds_are_ignored(world):
    """Its workers answer the next one, which has asked nothing yet: all of them would be lost at once."""
    for rank in range(6):
        world.paths.add(rank, 1, [(rank + 2) % 6])
    assert world.check(0.0) == "" and not world.server.killed


def test_hosts_that_the_run_needs_end_it(world):
    world.protocol.can_spare = lambda ranks: False
    number = world.begin_round()
    world.paths.add(2, number, [4])
    why = world.check(QUIET_S + PROBE_S + ANSWER_S)
    assert "b and c can't reach each other" in why and not world.server.killed


def test_a_cut_path_before_the_first_step_ends_the_run(world):
    number = world.begin_round()
    world.paths.add(2, number, [4])
    why = world.check(QUIET_S + PROBE_S + ANSWER_S, has_trained=False)
    assert why.startswith("before the first step, b and c can't reach each other: does a firewall")
    assert not world.server.killed


def test_a_worker_without_a_connection_is_killed_unless_it_ends(world):
    world.fences.on_connection_lost(1, "", 0.0)
    world.fences.on_connection_lost(2, "'x' from a worker", 0.0)
    world.fences.on_connection_lost(3, "", 0.0)
    world.fences.on_finish(4)
    world.fences.on_connection_lost(4, "", 0.0)
    world.status.record_exit(3, exit_code=-9, by_guardian=False)
    world.fences.check(0.1)
    assert world.server.killed == {2: "its connection to the coordinator broke ('x' from a worker)"}
    world.fences.check(BROKEN_CHANNEL_S)
    assert world.server.killed.keys() == {1, 2}


def test_a_worker_that_connects_again_stays(world):
    world.fences.on_connection_lost(1, "", 0.0)
    world.fences.on_connected(1)
    world.fences.check(2 * BROKEN_CHANNEL_S)
    assert not world.server.killed


def test_probes_of_this_host():
    """An open port and a refused one both show that the kernel answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.2", 0)) as closed:
        addresses = {1: listener.getsockname(), 2: closed.getsockname(), 4: listener.getsockname()}
        closed.close()
        assert unreachable_ranks([1, 2, 3, 4], addresses, timeout_s=10) == []
    assert unreachable_ranks([9], {9: ("host.invalid", 1)}, timeout_s=0.1) == [9]


def test_answers_that_arrive_while_the_process_gets_no_core_count(monkeypatch):
    """Three seconds pass between any two looks at the clock: each attempt is over before its answer is read."""
    clock = itertools.count(step=3.0)
    monkeypatch.setattr(path_probe, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert unreachable_ranks([1], {1: listener.getsockname()}, timeout_s=10) == []


def test_neighbours_first():
    assert likely_first(0, range(8)) == [1, 5, 7, 2, 6, 4, 3]  # children 1 and 5, then distances 1, 2, 4, 3
    assert set(likely_first(100, range(1000))[:3]) == {99, 101, 104}  # the tree's
    assert likely_first(5, [3, 5]) == [3] and likely_first(5, []) == []
