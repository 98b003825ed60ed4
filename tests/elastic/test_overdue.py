"""When a step is overdue, and the survey that asks everybody."""

from threading import Thread
from typing import Any

import pytest

from parallel3d.comm.abort import AbortToken, Wait
from parallel3d.elastic.overdue import ANSWER_S, OverdueRule, Pace, Survey
from parallel3d.elastic.whereabouts import Whereabouts

RULE = OverdueRule(factor=10.0, min_s=2.0)


def paced(*step_s, rule=RULE):
    """A run that has made these steps, the last one at time 100."""
    pace = Pace(rule)
    for number, seconds in enumerate(step_s):
        pace.note({"kind": "step", "step": number + 1, "step_s": seconds}, 100.0)
    return pace


@pytest.mark.parametrize(
    "steps, limit_s",
    [
        ((), 20.0),  # nothing is known yet
        ((0.5, 0.5), 20.0),
        ((0.5, 0.5, 0.5), 5.0),
        ((0.1, 0.1, 0.1), 2.0),  # min_s
        ((9.0, 0.5, 0.5, 0.5, 0.5), 5.0),  # the median: one slow step is no measure
    ],
)
def test_the_limit(steps, limit_s):
    pace = paced(*steps)
    assert pace.limit_s == limit_s
    if steps:
        assert pace.overdue_s(100.0 + limit_s - 0.01) is None
        assert pace.overdue_s(100.0 + limit_s) == pytest.approx(limit_s)


def test_it_is_told_again_when_the_wait_has_doubled():
    pace = paced(0.5, 0.5, 0.5)
    told = [now for now in range(101, 200) if pace.overdue_s(float(now)) is not None]
    assert told == [105, 110, 120, 140, 180]


def test_news_begin_the_wait_anew():
    pace = paced(0.5, 0.5, 0.5)
    assert pace.overdue_s(105.0) is not None
    news: list[dict[str, Any]] = [{"kind": "step", "step_s": 5.0}]
    news += [{"kind": kind} for kind in ("resumed", "training", "evaluation")]
    for record in news:
        pace.note(record, 106.0)
        assert pace.overdue_s(110.9) is None and pace.overdue_s(111.0) is not None
    pace.note({"kind": "notice"}, 112.0)
    assert pace.overdue_s(116.0) is not None
    pace.note({"kind": "evaluating"}, 120.0)
    assert pace.overdue_s(169.0) is None and pace.overdue_s(170.0) is not None
    pace.note({"kind": "summary"}, 171.0)
    assert pace.overdue_s(10**6) is None


def test_nothing_is_overdue_before_training_begins():
    pace = Pace(RULE)
    assert pace.overdue_s(10**6) is None
    pace.note({"kind": "training"}, 60.0)
    assert pace.overdue_s(79.0) is None and pace.overdue_s(80.0) is not None


def test_a_survey_is_over_when_all_have_answered_or_time_is_up():
    def told(**fields):
        return {"doing": "step 3, forward 1", "for_s": 4.0, "is_waiting": False, "what": "", "peers": [], **fields}

    survey = Survey("why:", [0, 1, 4], {0: "pp0 dp0 tp0", 1: "pp0 dp1 tp0"}, 10.0)
    survey.note(0, told(is_waiting=True, peers=[4], doing="step 3, receive gradient 1 <- (1, 0)"))
    survey.note(9, told())  # was lost meanwhile
    assert not survey.is_over(10.0 + ANSWER_S / 2)
    assert survey.is_over(10.0 + ANSWER_S)
    survey.note(1, told())
    assert survey.table().splitlines() == [
        "why:",
        "  rank 0 (pp0 dp0 tp0) [step 3, receive gradient 1 <- (1, 0)] 4.0 s waits for rank 4",
        "  rank 1 (pp0 dp1 tp0) [step 3, forward 1]                    4.0 s",
        "  rank 4               [-]                                          does not answer: others wait for it",
    ]
    survey.note(4, told())
    assert survey.is_over(10.0)


def test_a_worker_tells_what_its_own_thread_does():
    whereabouts = Whereabouts()
    assert whereabouts.tell()["doing"] == "starting"
    token = AbortToken()
    token.note_wait = whereabouts.note_wait
    whereabouts.begin("step", 7)
    whereabouts.enter("all_reduce")
    with token.waiting("epoch0/world", (0, 1)):
        told = whereabouts.tell()
    assert (told["doing"], told["is_waiting"], told["what"]) == ("step 7, all_reduce", True, "epoch0/world")
    assert told["peers"] == [0, 1] and 0 <= told["for_s"] < 60
    assert not whereabouts.tell()["is_waiting"]


def test_waits_of_other_threads_are_not_its_own():

    whereabouts = Whereabouts()
    thread = Thread(target=whereabouts.note_wait, args=(Wait("", (1,)),))
    thread.start()
    thread.join(timeout=10)
    assert not whereabouts.tell()["is_waiting"]
