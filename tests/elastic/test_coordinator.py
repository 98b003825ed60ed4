"""The coordinator and the workers' seats, in one process: epochs begin, change and end as the protocol says."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from test_control import tell

from parallel3d.comm.abort import AbortToken
from parallel3d.elastic.control import Control, FrameReader
from parallel3d.elastic.membership import NOTHING, EpochRecord, Report
from parallel3d.elastic.pinboard import epoch_of
from parallel3d.elastic.seat import Opening
from parallel3d.elastic.seat_control import ControlSeat
from parallel3d.errors import EpochEnded, RunEnded
from parallel3d.topology.grid import Grid

GRID = Grid.straight(tp_size=1, pp_size=1, dp_size=2)


@pytest.fixture
def elastic(elastic_settings):
    return elastic_settings(GRID)


def report_of(control: Control, cut_epoch: int = NOTHING):
    return lambda epoch: Report(rank=control.rank, epoch=epoch, cut_epoch=cut_epoch, host="here")


def at_once(*calls):
    """Runs calls in threads of their own, returns what they return; a second is enough for all of them."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=5) for future in [pool.submit(call) for call in calls]]


def begin(*controls: Control) -> list[Opening]:
    """Brings all into epoch 0."""
    openings = at_once(*(partial(control.seat.enter, report_of(control)) for control in controls))
    at_once(*(partial(control.seat.confirm, 0, digest="d", moved_bytes=0) for control in controls))
    return openings


def tell_killed(guardian: socket.socket, *, rank: int, detect_s: float | None) -> None:
    end = {"rank": rank, "exit_code": -9, "by_guardian": False, "why": "", "detect_s": detect_s, "step": 6}
    tell(guardian, op="ended", ends=[end])


def test_an_epoch_begins_goes_on_without_a_lost_worker_and_is_released(world):
    _, connect, guardian, records = world
    first, second = connect(0), connect(1)
    assert begin(first, second)[0].record.members == (0, 1)
    assert first.seat.standing()["committed"]["epoch"] == 0
    tell_killed(guardian, rank=1, detect_s=0.02)
    opening = first.seat.enter(report_of(first, 0))
    assert (opening.record.epoch, opening.record.members, opening.record.grid.ranks) == (1, (0,), (0,))
    first.publish({"kind": "resumed", "epoch": 1, "regroup_s": 0.5, "plan": ""})  # too early, so it is not heeded
    first.seat.confirm(1, digest="d", moved_bytes=2**20)
    first.publish({"kind": "resumed", "epoch": 1, "regroup_s": 0.03, "plan": "a plan", "direction": "back"})
    first.publish({"kind": "step", "step": 1, "loss": 1.0, "step_s": 0.25})
    first.seat.finish()
    assert first.seat.enter(report_of(first)) is None
    first.finish(0)
    line, step, account = records
    assert line["kind"] == "membership" and (line["live"], line["spare"], line["lost"]) == (1, 0, 1)
    assert line["text"].startswith("epoch 1: lost rank 1 (pp0 dp1 tp0): killed by SIGKILL in step 6; 1 live")
    assert line["text"].endswith("regrouped 0.030), 1.0 MiB moved; a plan")
    assert step["kind"] == "step" and account["event"] == "membership"
    assert (account["detect_s"], account["regroup_s"], account["first_step_s"]) == (0.02, 0.03, 0.25)


def test_a_seal_ends_the_waits_of_its_epoch_at_once(world):
    _, connect, _, _ = world
    first, second = connect(0), connect(1)
    token = begin(first, second)[0].token
    asked = threading.Timer(0.1, second.seat.enter, (report_of(second, 0),), {"suspicion": "a link broke"})
    asked.start()
    with pytest.raises(EpochEnded, match="rank 1: a link broke"):
        first.get("epoch0/never", token)
    opening = first.seat.enter(report_of(first, 0), suspicion="rank 1 said so")  # a change is under way: no other one
    assert opening.record.epoch == 1 and opening.record.members == (0, 1) and opening.record.evicted == ()
    asked.join(5)


def test_a_late_worker_learns_of_the_change_that_it_has_missed(world):
    _, connect, guardian, _ = world
    tell_killed(guardian, rank=1, detect_s=None)
    time.sleep(0.1)
    opening = connect(0).seat.enter(lambda epoch: Report(rank=0, epoch=max(epoch, 1)))
    assert opening.record.epoch == 1 and [loss.rank for loss in opening.record.evicted] == [1]


def test_different_plans_end_the_run(world):
    _, connect, _, _ = world
    controls = connect(0), connect(1)
    at_once(*(partial(control.seat.enter, report_of(control)) for control in controls))

    def confirm(control: Control) -> str:
        with pytest.raises(RunEnded) as caught:
            control.seat.confirm(0, digest=f"plan {control.rank}", moved_bytes=0)
        return str(caught.value)

    assert all("different plans" in told for told in at_once(*(partial(confirm, control) for control in controls)))


def test_a_word_that_breaks_the_protocol_ends_the_run(world):
    _, connect, _, _ = world
    first, second = connect(0), connect(1)
    begin(first, second)
    threading.Timer(0.05, second._send, ({"op": "confirm", "epoch": 7, "digest": "", "moved_bytes": 0},)).start()
    with pytest.raises(RunEnded, match="rank 1 .*ProtocolError: rank 1 speaks of epoch 7"):
        first.seat.finish()


def test_the_store_forgets_epochs_that_are_over(world):
    _, connect, guardian, _ = world
    first, second = connect(0), connect(1)
    begin(first, second)
    keys = ["epoch0/a", "epoch1/b", "corpus"]
    for key in keys:
        first.set(key, b"")
    tell_killed(guardian, rank=1, detect_s=None)
    first.seat.enter(report_of(first, 0))
    assert [first.check([key], AbortToken()) for key in keys] == [True, True, True]  # not before it is committed
    first.seat.confirm(1, digest="", moved_bytes=0)
    assert [first.check([key], AbortToken()) for key in keys] == [False, True, True]


def test_the_epoch_of_a_key():
    assert [epoch_of(key) for key in ("epoch12/world/0", "epoch0/x")] == [12, 0]
    assert all(epoch_of(key) == float("inf") for key in ("epoch/x", "corpus/epoch1/", "epoch1"))


def test_the_round_trip_decides_the_patience_once(world):
    _, connect, guardian, records = world
    control = connect(0)
    control.publish({"kind": "round_trip", "seconds": 0.002})
    control.publish({"kind": "round_trip", "seconds": 9.0})
    reader, frames = FrameReader(), []
    while len(frames) < 2:
        frames += reader.feed(guardian.recv(1000))
    assert [header for header, _ in frames] == [
        {"op": "welcome"},
        {"op": "watch", "silence_s": 2.0, "stuck_s": 60.0},
    ]
    assert not control.check(["x"], AbortToken())
    assert [record["text"] for record in records] == ["timeouts: silence 2.00 s, stuck 60 s (round trip 2.00 ms)"]


def test_steps_that_a_new_leader_tells_again_are_told_once(world):
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


def test_departures_of_a_host_are_decided_together(world):
    _, connect, guardian, _ = world
    controls = [connect(0), connect(1)]
    begin(*controls)
    controls[1].ask_to_leave()
    time.sleep(0.05)
    assert not controls[1].leave_requested  # others may follow
    wait_until(lambda: controls[1].leave_requested)
    assert not controls[0].leave_requested and not any(control.stop_requested for control in controls)
    tell(guardian, op="leave")  # all that is left of the run: it stops
    wait_until(lambda: all(control.stop_requested for control in controls))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_record_that_comes_after_the_runs_end_opens_nothing():
    token = AbortToken()
    seat = ControlSeat(rank=0, send=lambda frame: None, run_token=token)
    token.abort("over")
    record = EpochRecord(epoch=0, grid=GRID, previous=None, members=(0, 1))
    seat.heed({"op": "record", "record": record.to_json()})
    seat.heed({"op": "go", "epoch": 0})
    assert seat._opening.token.aborted
    with pytest.raises(RunEnded, match="over"):
        seat.finish()


def test_news_that_overtake_the_worker():
    """The seal of epoch 2 comes while the worker has not looked at the record of epoch 1 yet."""
    sent: list[dict] = []
    seat = ControlSeat(rank=0, send=sent.append, run_token=AbortToken())

    def answer(frame):
        sent.append(frame)
        if frame["op"] == "report":
            epoch = frame["report"]["epoch"]
            record = EpochRecord(epoch=epoch, grid=GRID, previous=None, members=(0, 1))
            seat.heed({"op": "record", "record": record.to_json()})
            if epoch == 0:
                seat.heed({"op": "seal", "epoch": 1, "reason": "rank 1 was lost"})

    seat._send = answer
    opening = seat.enter(lambda epoch: Report(rank=0, epoch=epoch))
    assert [frame["report"]["epoch"] for frame in sent] == [0, 1] and opening.record.epoch == 1
    seat.heed({"op": "go", "epoch": 1})
    seat.heed({"op": "seal", "epoch": 2, "reason": "rank 2 was lost"})
    seat.confirm(1, digest="", moved_bytes=0)  # it came before: the epoch is committed, though over
    assert seat.standing()["committed"]["epoch"] == 1 and opening.token.aborted
    with pytest.raises(EpochEnded, match="rank 2 was lost"):
        seat.finish()
