"""The coordinator and membership clients in one process: generations begin, change and end by the protocol."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from parallel3d.elastic.coordinator.kv_store import generation_of
from parallel3d.elastic.frames import FrameReader
from parallel3d.elastic.protocol.membership import NO_GENERATION, GenerationRecord, StateReport
from parallel3d.elastic.protocol.record_delta import record_frame
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.elastic.worker.membership_client import MembershipClient, PendingGeneration
from parallel3d.errors import GenerationEnded, RunEnded
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from tests.elastic.test_control_channel import send

GRID = Grid.uniform(tp_size=1, pp_size=1, dp_size=2)


@pytest.fixture
def elastic(elastic_settings):
    return elastic_settings(GRID)


def report_of(control: ControlChannel, state_generation: int = NO_GENERATION):
    return lambda generation: StateReport(
        rank=control.rank, generation=generation, state_generation=state_generation, host="here"
    )


def at_once(*calls):
    """Runs calls in threads of their own and returns their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=300) for future in [pool.submit(call) for call in calls]]


def begin(*controls: ControlChannel) -> list[PendingGeneration]:
    """Brings all into generation 0."""
    pendings = at_once(*(partial(control.membership.next_generation, report_of(control)) for control in controls))
    at_once(*(partial(control.membership.confirm, 0, digest="d", moved_bytes=0) for control in controls))
    return pendings


def report_killed(guardian: socket.socket, *, rank: int, detect_s: float | None) -> None:
    end = {"rank": rank, "exit_code": -9, "by_guardian": False, "why": "", "detect_s": detect_s, "step": 6}
    send(guardian, op="ended", ends=[{**end, "permission": ""}])


def test_a_generation_begins_continues_without_a_lost_worker_and_finishes(world):
    _, connect, guardian, records = world
    first, second = connect(0), connect(1)
    assert begin(first, second)[0].record.members == (0, 1)
    assert first.membership.membership_state()["committed_generation"] == 0
    report_killed(guardian, rank=1, detect_s=0.02)
    pending = first.membership.next_generation(report_of(first, 0))
    assert (pending.record.generation, pending.record.members, pending.record.grid.ranks) == (1, (0,), (0,))
    first.publish({"kind": "resumed", "generation": 1, "regroup_s": 0.5, "plan": ""})  # too early, so it is ignored
    first.membership.confirm(1, digest="d", moved_bytes=2**20)
    first.publish({"kind": "resumed", "generation": 1, "regroup_s": 0.03, "plan": "a plan", "direction": "back"})
    first.publish({"kind": "step", "step": 1, "loss": 1.0, "step_s": 0.25})
    first.membership.finish()
    assert first.membership.next_generation(report_of(first)) is None
    first.finish(0)
    line, hint, step, account = records
    assert "elastic.max_rejoins is 0" in hint["text"]
    assert line["kind"] == "membership" and (line["live"], line["spare"], line["lost"]) == (1, 0, 1)
    assert line["text"].startswith("generation 1: lost rank 1 (pp0 dp1 tp0): killed by SIGKILL in step 6; 1 live")
    assert line["text"].endswith("regrouped 0.030), 1.0 MiB moved; a plan")
    assert step["kind"] == "step" and account["event"] == "membership"
    assert (account["detect_s"], account["regroup_s"], account["first_step_s"]) == (0.02, 0.03, 0.25)


def test_an_abort_ends_the_waits_of_its_generation_at_once(world):
    _, connect, _, _ = world
    first, second = connect(0), connect(1)
    token = begin(first, second)[0].token
    asked = threading.Timer(
        0.1, second.membership.next_generation, (report_of(second, 0),), {"suspicion": "a link broke"}
    )
    asked.start()
    with pytest.raises(GenerationEnded, match="rank 1: a link broke"):
        first.get("generation0/never", token)
    pending = first.membership.next_generation(
        report_of(first, 0), suspicion="rank 1 said so"
    )  # a change is under way: no other one
    assert pending.record.generation == 1 and pending.record.members == (0, 1) and pending.record.evicted == ()
    asked.join(5)


def test_a_late_worker_learns_of_the_change_that_it_has_missed(world):
    _, connect, guardian, _ = world
    report_killed(guardian, rank=1, detect_s=None)
    time.sleep(0.1)
    pending = connect(0).membership.next_generation(
        lambda generation: StateReport(rank=0, generation=max(generation, 1))
    )
    assert pending.record.generation == 1 and [loss.rank for loss in pending.record.evicted] == [1]


def test_different_plans_end_the_run(world):
    _, connect, _, _ = world
    controls = connect(0), connect(1)
    at_once(*(partial(control.membership.next_generation, report_of(control)) for control in controls))

    def confirm(control: ControlChannel) -> str:
        with pytest.raises(RunEnded) as caught:
            control.membership.confirm(0, digest=f"plan {control.rank}", moved_bytes=0)
        return str(caught.value)

    assert all("different plans" in text for text in at_once(*(partial(confirm, control) for control in controls)))


def test_states_that_contradict_each_other_end_the_run(world):
    _, connect, _, _ = world
    first, second = connect(0), connect(1)

    def enter(control: ControlChannel) -> str:
        with pytest.raises(RunEnded) as caught:
            control.membership.next_generation(
                lambda generation: StateReport(rank=control.rank, generation=generation, state_generation=control.rank)
            )
        return str(caught.value)

    for text in at_once(partial(enter, first), partial(enter, second)):
        assert "ProtocolError: rank 0 holds the ranges of generation 0" in text or "rank 1 holds the ranges" in text


def test_the_store_drops_generations_that_are_over(world):
    _, connect, guardian, _ = world
    first, second = connect(0), connect(1)
    begin(first, second)
    keys = ["generation0/a", "generation1/b", "corpus"]
    for key in keys:
        first.set(key, b"")
    report_killed(guardian, rank=1, detect_s=None)
    first.membership.next_generation(report_of(first, 0))
    assert [first.check([key], AbortToken()) for key in keys] == [True, True, True]  # not before it is committed
    first.membership.confirm(1, digest="", moved_bytes=0)
    assert [first.check([key], AbortToken()) for key in keys] == [False, True, True]


def test_the_generation_of_a_key():
    assert [generation_of(key) for key in ("generation12/world/0", "generation0/x")] == [12, 0]
    assert all(generation_of(key) == float("inf") for key in ("generation/x", "corpus/generation1/", "generation1"))


def test_the_round_trip_sets_the_heartbeat_timeouts_once(world):
    _, connect, guardian, records = world
    control = connect(0)
    control.publish({"kind": "round_trip", "seconds": 0.002})
    control.publish({"kind": "round_trip", "seconds": 9.0})
    reader, frames = FrameReader(), []
    while len(frames) < 2:
        frames += reader.feed(guardian.recv(1000))
    assert [header for header, _ in frames] == [
        {"op": "welcome"},
        {"op": "monitor", "heartbeat_timeout_s": 2.0, "watchdog_timeout_s": 60.0},
    ]
    assert not control.check(["x"], AbortToken())
    assert [record["text"] for record in records] == ["timeouts: heartbeat 2.00 s, watchdog 60 s (round trip 2.00 ms)"]


def test_steps_that_a_new_leader_repeats_are_published_once(world):
    _, connect, _, records = world
    first, second = connect(0), connect(1)
    for step in (1, 2):
        first.publish({"kind": "step", "step": step})
    first.publish({"kind": "evaluation", "step": 2, "loss": 1.0})
    assert not first.check(["x"], AbortToken())
    for step in (2, 3):
        second.publish({"kind": "step", "step": step})
        second.publish({"kind": "evaluation", "step": step, "loss": 1.0})
    assert not second.check(["x"], AbortToken())
    assert [(record["kind"], record["step"]) for record in records] == [
        ("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("evaluation", 3),
    ]  # fmt: skip


def test_drains_of_a_host_are_decided_together(world):
    _, connect, guardian, _ = world
    controls = [connect(0), connect(1)]
    begin(*controls)
    controls[1].announce_drain()
    time.sleep(0.05)
    assert not controls[1].drain_requested  # others may follow
    wait_until(lambda: controls[1].drain_requested)
    assert not controls[0].drain_requested and not any(control.stop_requested for control in controls)
    send(guardian, op="announce_drain")  # all that is left of the run: it stops
    wait_until(lambda: all(control.stop_requested for control in controls))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_record_that_comes_after_the_runs_end_opens_nothing():
    token = AbortToken()
    membership = MembershipClient(rank=0, send=lambda frame: None, run_token=token)
    token.abort("over")
    record = GenerationRecord(generation=0, grid=GRID, previous=None, members=(0, 1))
    membership.handle(*record_frame(record, None))
    membership.handle({"op": "commit", "generation": 0})
    assert membership._pending.token.aborted
    with pytest.raises(RunEnded, match="over"):
        membership.finish()


def test_frames_that_arrive_before_the_worker_reads_the_last_ones():
    """The abort of generation 1 arrives before the worker has read its record."""
    sent: list[dict] = []
    membership = MembershipClient(rank=0, send=sent.append, run_token=AbortToken())

    def answer(frame):
        sent.append(frame)
        if frame["op"] == "report":
            generation = frame["report"]["generation"]
            record = GenerationRecord(generation=generation, grid=GRID, previous=None, members=(0, 1))
            membership.handle(*record_frame(record, None))
            if generation == 0:
                membership.handle({"op": "abort_generation", "generation": 1, "reason": "rank 1 was lost"})

    membership._send = answer
    pending = membership.next_generation(lambda generation: StateReport(rank=0, generation=generation))
    assert [frame["report"]["generation"] for frame in sent] == [0, 1] and pending.record.generation == 1
    membership.handle({"op": "commit", "generation": 1})
    membership.handle({"op": "abort_generation", "generation": 2, "reason": "rank 2 was lost"})
    membership.confirm(1, digest="", moved_bytes=0)  # it came before: the generation is committed, though over
    assert membership.membership_state()["committed_generation"] == 1 and pending.token.aborted
    with pytest.raises(GenerationEnded, match="rank 2 was lost"):
        membership.finish()


def test_a_worker_may_end_once_it_is_drained_or_the_run_finished():
    membership = MembershipClient(rank=1, send=lambda frame: None, run_token=AbortToken())
    record = GenerationRecord(generation=0, grid=GRID, previous=None, members=(0, 1), draining=(1,))
    membership.handle(*record_frame(record, None))
    assert membership.permission == ""  # it still hands over
    membership.handle({"op": "commit", "generation": 0})
    assert membership.permission == "drained"
    membership.handle({"op": "finish_run"})
    assert membership.permission == "finished"


@pytest.mark.parametrize("request_", [{"op": "stop", "signal": 2, "at_once": False}, {"op": "announce_drain"}], ids=str)
def test_a_run_that_waits_for_workers_stops_at_once(world, request_):
    """Its Ctrl-C would else be heard after the first step, which never comes."""
    _, connect, guardian, _ = world
    control = connect(0)
    assert not control.check(["x"], AbortToken())
    send(guardian, **request_)
    with pytest.raises(GenerationEnded, match="stopped at once"):
        control.token.sleep(10)
