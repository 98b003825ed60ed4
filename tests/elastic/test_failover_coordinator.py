"""A failover coordinator in one process: its quorum check, and the first frames that it sends."""

from __future__ import annotations

import pytest

from parallel3d.elastic.frames import encode_frame, encode_from_workers
from parallel3d.elastic.protocol.membership import LogPosition, digest_entries
from parallel3d.elastic.protocol.record_delta import decode_record
from tests.support.failover_world import GRID, HOSTS, World, end_of, record, send_report


@pytest.fixture
def world(elastic_settings):
    world = World(elastic_settings)
    yield world
    for connection in world.readers:
        connection.close()
    world.serving.join(5)


def test_a_generation_that_one_worker_knows_to_be_committed_is_committed_for_all(world):
    """Rank 1 has received the commit, rank 2 has only confirmed, rank 3 has received a later attempt."""
    guardians = [world.guardian(rank) for rank in (1, 2, 3)]
    first, behind, ahead = world.worker(1, record(4), 4), world.worker(2, record(2), 4), world.worker(3, record(4), 6)
    assert [frame["op"] for frame in world.receive(behind, "abort_generation")] == ["commit", "abort_generation"]
    (abort_generation,) = world.receive(first, "abort_generation")
    assert abort_generation == {
        "op": "abort_generation",
        "generation": 7,
        "reason": abort_generation["reason"],
    }  # after every number that any rank has received
    assert "lost rank 0: lost in step 6: its guardian on a is gone" in abort_generation["reason"]
    assert [frame["op"] for frame in world.receive(ahead, "abort_generation")] == ["abort_generation"]
    for rank, worker in ((1, first), (2, behind), (3, ahead)):
        send_report(worker, rank, 7, 4, 5)
    opened = decode_record(world.receive(first, "record")[-1]["payload"], record(4))
    assert world.fetched_from == [first]
    assert (opened.members, opened.last_reported_step, opened.previous) == ((1, 2, 3), 5, GRID)
    assert world.report.records[0]["text"] == "the run goes on without its coordinator on a, from generation 4"
    assert [frame["op"] for frame in world.receive(guardians[0], "welcome")][0] == "welcome"


def test_a_worker_whose_eviction_was_not_committed_is_a_member_again(world):
    """The old coordinator took rank 3 for dead, since it lost its guardian, and rank 3 alone has the newest entry."""
    for rank in (1, 2, 3):
        world.guardian(rank)
    workers = {rank: world.worker(rank, record(4), 4 if rank == 3 else 5) for rank in (1, 2, 3)}
    entries = b"the entries up to 6"
    for rank, worker in workers.items():
        (abort_generation,) = world.receive(worker, "abort_generation")
        assert abort_generation["generation"] == 6
        newest, mine = (6, entries) if rank == 3 else (5, b"")
        send_report(worker, rank, 6, 4, newest, digest=digest_entries(mine))
    world.receive(workers[3], "fetch_entries")
    workers[3].sendall(encode_frame({"op": "entries", "generation": 6}, entries))
    sent, opened = world.receive(workers[1], "record")
    assert (sent["op"], sent["payload"]) == ("entries", entries)
    opened = decode_record(opened["payload"], record(4))
    assert opened.members == opened.grid.ranks == (1, 2, 3) and opened.position == LogPosition(iteration=6)


def test_a_joined_worker_whose_eviction_was_committed_joins_again_as_a_new_one(world):
    """Its ranges of generation 2 count for nothing (test_reshard.py), whatever position it reports."""
    for rank, joined in ((1, []), (2, []), (3, [9])):
        world.guardian(rank, joined=joined)
    workers = {rank: world.worker(rank, record(4), 4) for rank in (1, 2, 3)}
    state = {"newest_generation": 2, "committed_generation": 2, "part": [0, 0], "is_ready": True}
    workers[9] = world.connect(role="worker", ranks=[9], host="d", log="", membership_state=state)
    for rank, worker in workers.items():
        world.receive(worker, "abort_generation")
        send_report(worker, rank, 5, *((2, 2) if rank == 9 else (4, 5)))
    opened = decode_record(world.receive(workers[1], "record")[-1]["payload"], record(4))
    assert opened.grid.ranks == (1, 2, 3, 9) and opened.joiners == (9,) and opened.state_source == 1
    assert opened.position == LogPosition(iteration=5)


def test_a_guardian_that_connects_twice_during_the_quorum_check_keeps_its_worker(world):
    """The first time it gave up waiting, just as it was welcomed."""
    state = {"newest_generation": 2, "committed_generation": 2, "part": None, "is_ready": True}
    hello = {"op": "hello", "role": "worker", "ranks": [1], "host": "b", "log": "", "membership_state": state}
    for _ in range(2):
        guardian = world.guardian(1)
        world.receive(guardian, "welcome")
        guardian.sendall(encode_from_workers([(1, encode_frame(hello))]))
    for rank in (2, 3):
        world.guardian(rank)
    worker, _ = (world.worker(rank, record(4), 4) for rank in (2, 3))
    (abort_generation,) = world.receive(worker, "abort_generation")
    assert "lost rank 0: lost in step 6" in abort_generation["reason"] and "rank 1" not in abort_generation["reason"]
    frames = world.receive(guardian, "to_workers")
    assert "close_worker" not in [frame["op"] for frame in frames]


def test_a_worker_that_did_not_join_is_not_reported_again(world):
    for rank in (1, 2, 3):
        world.guardian(rank, *([end_of(7, -9)] if rank == 2 else []), joined=[7] if rank == 2 else [])
    workers = [world.worker(rank, record(4), 4) for rank in (1, 2, 3)]
    workers[0].sendall(encode_frame({"op": "check", "id": 1, "keys": ["x"]}))
    world.receive(workers[0], "response")
    assert [each["text"] for each in world.report.records if "rank 7" in each.get("text", "")] == []


def test_a_guardian_that_began_late_learns_the_timeouts_from_the_others(world):
    timeouts = {"heartbeat_timeout_s": 1.5, "watchdog_timeout_s": 300.0}
    guardians = [world.guardian(rank, monitor=timeouts if rank == 2 else None) for rank in (1, 2, 3)]
    for rank in (1, 2, 3):
        world.worker(rank, record(4), 4)
    for guardian in guardians:
        assert world.receive(guardian, "monitor")[-1] == {"op": "monitor", **timeouts}


def test_messages_sent_to_the_old_coordinator_are_handled_after_the_quorum_check(world):
    """Rank 2 was killed meanwhile; rank 1 still refers to the old generation."""
    for rank in (1, 3):
        world.guardian(rank)
    first = world.worker(1, record(4), 4)
    first.sendall(encode_frame({"op": "suspect", "generation": 4, "reason": "a link broke"}))
    first.sendall(encode_frame({"op": "publish", "record": {"kind": "step", "step": 5}}))
    first.sendall(encode_frame({"op": "publish", "record": {"kind": "step", "step": 6}}))
    world.worker(3, record(4), 4)
    world.guardian(2, end_of(2, -9))
    aborts = world.receive(first, "abort_generation")
    aborts += world.receive(first, "abort_generation") if len(aborts) < 2 else []
    assert [abort_generation["generation"] for abort_generation in aborts] == [5, 6]
    first.sendall(encode_frame({"op": "check", "id": 1, "keys": ["x"]}))
    world.receive(first, "response")
    assert "lost rank 0" in aborts[0]["reason"] and "lost rank 2: killed by SIGKILL" in aborts[1]["reason"]
    assert [r["step"] for r in world.report.records if r.get("kind") == "step"] == [6]  # the folder had 5


def test_what_workers_compare_while_the_coordinator_changes_they_compare_here(world):
    """Rank 1 has said it to the old one, whose store is gone, and says it again before and after the quorum check."""

    def compare(state):
        header = {"op": "compare", "key": "generation9/groups", "size": 2, "numbers": [0, 4]}
        return encode_frame({**header, "states": ["same", state]})

    for rank in (1, 2, 3):
        world.guardian(rank)
    first = world.worker(1, record(4), 4)
    first.sendall(compare("a"))
    second, _ = world.worker(2, record(4), 4), world.worker(3, record(4), 4)
    first.sendall(compare("a"))
    world.receive(first, "abort_generation")
    second.sendall(compare("b"))
    for worker in (first, second):
        answer = world.receive(worker, "response")[-1]
        assert (answer["id"], answer["payload"]) == ("generation9/groups", bytes([1 << 4]))


def test_what_the_old_coordinator_knew_is_not_reported_again(world):
    """Rank 3 was lost long ago; its guardian reports that to every coordinator."""
    world.guardian(3, end_of(3, -9))
    for rank in (1, 2):
        world.guardian(rank)
    waiting = [world.worker(rank, record(4, 3), 4) for rank in (1, 2)]
    (abort_generation,) = world.receive(waiting[0], "abort_generation")
    assert "lost rank 0" in abort_generation["reason"] and "rank 3" not in abort_generation["reason"]
    error = {"text": "E", "exit_code": 1, "consequence": False, "is_run_wide": False, "step": 6}
    waiting[0].sendall(encode_frame({"op": "error", "error": error}))
    world.receive(waiting[1], "abort")
    assert world.serving.join(0.0).message.startswith("rank 1 (pp0 dp1 tp0), step 6: E")
    assert world.coordinator._status.workers[3].lost_worker is None


def test_a_worker_that_the_run_has_evicted_is_ended(world):
    """Rank 3, stalled until now, has not got the commit that goes on without it. It is not a loss of this change."""
    guardians = {rank: world.guardian(rank) for rank in (1, 2, 3)}
    first, _, _ = world.worker(1, record(4, 3), 4), world.worker(2, record(4, 3), 4), world.worker(3, record(3), 4)
    (kill,) = world.receive(guardians[3], "kill")[-1:]
    assert kill["ends"] == [[3, "evicted before this coordinator took over"]]
    guardians[3].sendall(encode_frame({"op": "ended", "ends": [{**end_of(3, -9), "by_guardian": True}]}))
    (abort_generation,) = world.receive(first, "abort_generation")
    assert "lost rank 0" in abort_generation["reason"] and "rank 3" not in abort_generation["reason"]
    for rank in (1, 2):
        assert "kill" not in [frame["op"] for frame in world.received.get(guardians[rank], [])]


def test_a_run_that_had_been_released_is_over(world):
    for rank in (2, 3):
        world.guardian(rank)
    world.guardian(1, end_of(1, 0, "finished"))
    waiting = [world.worker(rank, record(4), 4) for rank in (2, 3)]
    for worker in waiting:
        assert [frame["op"] for frame in world.receive(worker, "finish_run")] == ["finish_run"]
        assert world.report.num_flushes == 1  # before: once released, no worker can repeat a record


def test_a_run_whose_workers_have_all_been_released_and_ended_only_lacks_its_summary(world):
    for rank in (1, 2, 3):
        world.guardian(rank, end_of(rank, 0, "finished"))
    outcome = world.serving.join(10)
    assert outcome.exit_code == 0 and not outcome.message
    notice, over = world.report.records
    assert notice["text"] == "the coordinator on a was lost after the run's last step"
    assert over == {"kind": "outcome", "exit_code": 0}


def test_a_run_is_over_once_a_worker_shows_that_it_had_been_released(world):
    """It could still say hello: this coordinator has begun a change with it."""
    guardians = {rank: world.guardian(rank) for rank in (1, 2, 3)}
    workers = {rank: world.worker(rank, record(4), 4) for rank in (1, 2, 3)}
    world.receive(workers[2], "abort_generation")
    guardians[1].sendall(encode_frame({"op": "ended", "ends": [end_of(1, 0, "finished")]}))
    for rank in (2, 3):
        world.receive(workers[rank], "finish_run")
        guardians[rank].sendall(encode_frame({"op": "ended", "ends": [end_of(rank, 0, "finished")]}))
    assert world.serving.join(10).exit_code == 0 and not world.coordinator._status.failures


def test_a_run_whose_workers_have_all_failed_is_not_over(elastic_settings):
    world = World(elastic_settings)
    for rank in (1, 2, 3):
        world.guardian(rank, end_of(rank, 1))
    assert world.serving.join(10).exit_code == 4 and not world.opened


def test_a_drained_worker_does_not_end_the_run(world):
    """Rank 2 alone has learnt that generation 5 was committed, with which it left."""
    for rank in (1, 3):
        world.guardian(rank)
    world.guardian(2, end_of(2, 0, "drained"))
    waiting = [world.worker(rank, record(4), 5) for rank in (1, 3)]
    (abort_generation,) = world.receive(waiting[0], "abort_generation")
    assert abort_generation["generation"] == 6
    assert "lost rank 0" in abort_generation["reason"] and "lost rank 2: drained" in abort_generation["reason"]
    for rank, worker in zip((1, 3), waiting):
        send_report(worker, rank, 6, 4, 5)
    assert decode_record(world.receive(waiting[0], "record")[-1]["payload"], record(4)).members == (1, 3)
    assert not world.coordinator._status.failures


def test_without_a_quorum_nothing_is_opened(elastic_settings):
    world = World(elastic_settings, failover_s=0.3)
    guardian = world.guardian(1)
    worker = world.worker(1, record(4), 4)
    (abort,) = world.receive(worker, "abort")
    assert "this side reaches 1 of 4 hosts" in abort["reason"] and not world.opened
    assert world.receive(guardian, "over")[-1]["exit_code"] == 4
    for connection in world.readers:
        connection.close()
    assert world.serving.join(5).exit_code == 4


def test_without_a_quorum_each_host_says_why(elastic_settings):
    """The other host's guardian, whose terminal is not this coordinator's."""
    world = World(elastic_settings, failover_s=0.3)
    guardians = {rank: world.guardian(rank) for rank in (1, 2)}
    worker = world.worker(1, record(4), 4)
    world.receive(worker, "abort")
    assert "why" not in world.receive(guardians[1], "over")[-1]
    over = next(frame for frame in world.receive(guardians[2], "over") if frame["op"] == "over")
    assert over["why"].startswith("the run has ended with exit code 4: the run can't go on here: this side reaches ")
    for connection in world.readers:
        connection.close()
    assert world.serving.join(5).exit_code == 4


def test_who_connects_after_the_quorum_check_has_been_evicted(world):
    for rank in (1, 2, 3):
        world.guardian(rank)
    workers = [world.worker(rank, record(4), 4) for rank in (1, 2, 3)]
    world.receive(workers[0], "abort_generation")
    assert "the run goes on without this process: " in world.receive(world.guardian(0), "over")[-1]["why"]
    late = world.worker(0, record(4), 4)
    assert late.recv(1) == b""  # disconnected


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_joiner_that_is_too_late_for_the_quorum_check_goes_on_with_its_part(elastic_settings, is_ready):
    """The old coordinator had it started, and its guardian is in time. As a spare it might get another part to build
    than the one that it builds."""
    world = World(elastic_settings, failover_s=0.3)
    for rank, joined in ((1, []), (2, []), (3, [9])):
        world.guardian(rank, joined=joined)
    members = [world.worker(rank, record(4), 4) for rank in (1, 2, 3)]
    world.receive(members[0], "abort_generation")
    state = {"newest_generation": -1, "committed_generation": -1, "part": [0, 0], "is_ready": is_ready}
    late = world.connect(role="worker", ranks=[9], host="d", log="", membership_state=state)
    for frame in ({"op": "ready"}, {"op": "check", "id": 1, "keys": []}):
        late.sendall(encode_frame(frame))
    world.receive(late, "response")  # "ready" has not cost it its connection
    assert not any("is a spare" in each.get("text", "") for each in world.report.records)
    for connection in world.readers:
        connection.close()
    world.serving.join(5)


@pytest.mark.parametrize("rank", [0, 8])
def test_a_guardian_whose_joiners_nobody_knows_comes_too_late_and_is_heard(world, rank):
    """Its own first worker is of the first grid, or came by a command; a frame that is out of place would cost it the
    connection."""
    for other in (1, 2, 3):
        world.guardian(other)
    workers = [world.worker(other, record(4), 4) for other in (1, 2, 3)]
    world.receive(workers[0], "abort_generation")
    host, end = HOSTS.get(rank, "e"), end_of(9, -9)
    hello = {"role": "guardian", "ranks": [rank], "host": host, "address": world.address, "joined": [9]}
    guardian = world.connect(**hello, num_workers=0)
    guardian.sendall(encode_frame({"op": "ended", "ends": [end]}))
    guardian.sendall(encode_frame({"op": "stop", "signal": 15, "at_once": False}))
    world.receive(guardian, "stop")  # it is passed on to all guardians, this one included
