"""When a step counts as slow, and the collection of a hang report."""

from threading import Thread
from typing import Any

import pytest

from parallel3d.elastic.coordinator.slow_step import StepTimeBaseline
from parallel3d.elastic.hang_report import STATUS_TIMEOUT_S, HangReport
from parallel3d.elastic.settings import SlowStepRule
from parallel3d.elastic.worker.status_tracker import WorkerStatusTracker
from parallel3d.parallel.abort import AbortToken, Wait

RULE = SlowStepRule(factor=10.0, min_s=2.0)


def make_baseline(*step_s, rule=RULE):
    """A run that has made these steps, the last one at time 100."""
    baseline = StepTimeBaseline(rule)
    for number, seconds in enumerate(step_s):
        baseline.add({"kind": "step", "step": number + 1, "step_s": seconds}, 100.0)
    return baseline


@pytest.mark.parametrize(
    "steps, limit_s",
    [
        ((), 20.0),  # nothing is known yet
        ((0.5, 0.5), 20.0),
        ((0.5, 0.5, 0.5), 5.0),
        ((0.1, 0.1, 0.1), 2.0),  # min_s
        ((9.0, 0.5, 0.5, 0.5, 0.5), 5.0),  # the median: one slow step does not count
    ],
)
def test_the_limit(steps, limit_s):
    baseline = make_baseline(*steps)
    assert baseline.limit_s == limit_s
    if steps:
        assert baseline.slow_step_s(100.0 + limit_s - 0.01) is None
        assert baseline.slow_step_s(100.0 + limit_s) == pytest.approx(limit_s)


def test_it_is_reported_again_when_the_wait_has_doubled():
    baseline = make_baseline(0.5, 0.5, 0.5)
    reports = [now for now in range(101, 200) if baseline.slow_step_s(float(now)) is not None]
    assert reports == [105, 110, 120, 140, 180]


def test_progress_restarts_the_wait():
    baseline = make_baseline(0.5, 0.5, 0.5)
    assert baseline.slow_step_s(105.0) is not None
    news: list[dict[str, Any]] = [{"kind": "step", "step_s": 5.0}]
    news += [{"kind": kind} for kind in ("resumed", "training", "evaluation")]
    for record in news:
        baseline.add(record, 106.0)
        assert baseline.slow_step_s(110.9) is None and baseline.slow_step_s(111.0) is not None
    baseline.add({"kind": "notice"}, 112.0)
    assert baseline.slow_step_s(116.0) is not None
    baseline.add({"kind": "evaluating"}, 120.0)
    assert baseline.slow_step_s(169.0) is None and baseline.slow_step_s(170.0) is not None
    baseline.add({"kind": "summary"}, 171.0)
    assert baseline.slow_step_s(10**6) is None


def test_no_step_is_slow_before_training_begins():
    baseline = StepTimeBaseline(RULE)
    assert baseline.slow_step_s(10**6) is None
    baseline.add({"kind": "training"}, 60.0)
    assert baseline.slow_step_s(79.0) is None and baseline.slow_step_s(80.0) is not None


def test_a_hang_report_is_complete_when_all_have_answered_or_time_is_up():
    def answer(**fields):
        return {"doing": "step 3, forward 1", "for_s": 4.0, "is_waiting": False, "what": "", "peers": [], **fields}

    hang_report = HangReport("why:", [0, 1, 4], {0: "pp0 dp0 tp0", 1: "pp0 dp1 tp0"}, 10.0)
    hang_report.add(0, answer(is_waiting=True, peers=[4], doing="step 3, receive gradient 1 <- (1, 0)"))
    hang_report.add(9, answer())  # was lost meanwhile
    assert not hang_report.is_over(10.0 + STATUS_TIMEOUT_S / 2)
    assert hang_report.is_over(10.0 + STATUS_TIMEOUT_S)
    hang_report.add(1, answer())
    assert hang_report.format().splitlines() == [
        "why:",
        "  rank 0 (pp0 dp0 tp0) [step 3, receive gradient 1 <- (1, 0)] 4.0 s waits for rank 4",
        "  rank 1 (pp0 dp1 tp0) [step 3, forward 1]                    4.0 s",
        "  rank 4               [-]                                          does not answer, blocks others",
    ]
    hang_report.add(4, answer())
    assert hang_report.is_over(10.0)


def test_a_worker_reports_what_its_main_thread_does():
    worker_status = WorkerStatusTracker()
    assert worker_status.report()["doing"] == "starting"
    token = AbortToken()
    token.on_wait = worker_status.on_wait
    worker_status.begin("step", 7)
    worker_status.enter("all_reduce")
    with token.waiting("generation0/world", (0, 1)):
        status = worker_status.report()
    assert (status["doing"], status["is_waiting"], status["what"]) == ("step 7, all_reduce", True, "generation0/world")
    assert status["peers"] == [0, 1] and 0 <= status["for_s"] < 60
    assert not worker_status.report()["is_waiting"]


def test_waits_of_other_threads_are_not_its_own():

    worker_status = WorkerStatusTracker()
    thread = Thread(target=worker_status.on_wait, args=(Wait("", (1,)),))
    thread.start()
    thread.join(timeout=300)
    assert not worker_status.report()["is_waiting"]
