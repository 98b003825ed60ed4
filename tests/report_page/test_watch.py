"""`parallel3d watch`: the figures in any width, runs that end, die or begin again, and the page on the loopback."""

import fcntl
import io
import json
import math
import os
import time
import urllib.error
import urllib.request
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.commands.watch import (
    DEAD_AFTER_S,
    LineDisplay,
    NewestResults,
    ScreenDisplay,
    Watcher,
    main,
    read_facts,
)
from parallel3d.report_page.page_data import make_page
from parallel3d.report_page.page_file import read_run
from parallel3d.report_page.page_server import PageServer
from parallel3d.report_page.terminal_view import ASCII_BLOCKS, BLOCKS, FolderFacts, Screen, draw_curve, draw_lines
from parallel3d.report_page.watched_run import WatchedRun
from tests.report_page.test_page_data import CHANGE, run_files
from tests.report_page.test_page_results import NOON, publish

EVALUATION = {"event": "evaluation", "step": 20, "loss": 4.5, "seconds": 1.0, "time": 1010.0}
RETURN = CHANGE | {"step": 9, "who": [], "joined": [{"rank": 4, "coordinates": "pp1 dp1 tp0"}], "widths": [2, 2]}
SUMMARY = {"exit_code": 3, "message": "too many workers lost"}


def watched(lines):
    run = WatchedRun()
    for line in lines:
        run.add(line)
    return run


def write(folder, lines, *, summary=None, num_steps=80):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"run": {"num_steps": num_steps}}))
    (folder / ".lock").touch()
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))


class FakeTime:
    """A clock that only sleeping moves; `actions` run one after the other in the sleeps."""

    def __init__(self, *actions):
        self.now, self._actions = 0.0, iter(actions)

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 1000, "it never ends"
        next(self._actions, lambda: None)()


def watcher(folder, time, stream):
    return Watcher(folder, LineDisplay(stream), every_s=1.0, clock=time.clock, sleep=time.sleep)


def test_the_newest_figures_are_those_of_the_lines():
    run = watched([*run_files().lines, EVALUATION, EVALUATION | {"step": 40, "loss": 4.75}, CHANGE, RETURN])
    assert (run.step, run.newest["loss"], run.lowest_loss, run.step_s) == (40, pytest.approx(2.1), run.losses[-1], 0.5)
    assert (run.evaluation, run.best_evaluation) == ((40, 4.75), (20, 4.5))
    assert (run.num_lost, run.num_joined, run.widths) == (1, 1, (2, 2))
    assert [change.seconds for change in run.changes] == [0.875, 0.875]
    lines = draw_lines(run, FolderFacts(name="a", num_steps=80), Screen(width=100, height=50), status="running")
    shown = dict(line.split(maxsplit=1) for line in lines if line[0] != " ")
    assert shown["a"] == "step 40/80 (50%)  running" and shown["ETA"] == "0:20"
    assert shown["loss"] == "2.1000  lowest 2.1000; evaluation 4.7500 (step 40); best 4.5000 (step 20)"
    assert shown["tokens"] == "4,000 of about 8,000" and shown["width"] == "2/2"
    assert "last return step 9: 0.88 s, 2/2, worker 4 (pp1 dp1 tp0) joins" in lines


def test_a_restart_takes_its_steps_back():
    run = watched([*run_files(10).lines, CHANGE, {"event": "restart", "step": 4, "time": 1.0}])
    assert len(run.losses) == 4 and run.widths == () and len(run.changes) == 1
    run.add({"step": 5, "loss": 9.0})
    assert len(run.losses) == 5 and run.losses[-1] == 9.0 and run.num_restarts == 1


def test_stability_length_and_price_are_shown():
    """A repeated step takes the spike of its first attempt back, and what is repeated costs, too."""
    lines = [{"step": 5, "grad_spike": 1}, {"step": 6, "grad_spike": 2}, {"step": 7}, {"step": 8, "grad_spike": 1}]
    run = watched([{"event": "started", "step": 0, "time": 1000.0}, *lines])
    assert run.spikes == [5, 8]
    restart = {"event": "restart", "step": 6, "time": 4000.0}
    run = watched([run.starts[0], *lines, restart, {"step": 7, "loss": 2.0, "loss_ratio": 1.25, "sequence_length": 96}])
    facts = FolderFacts(name="a", dollars_per_hour=36.0)
    shown = draw_lines(run, facts, Screen(width=80, height=50), status="running")
    assert "loss ratio  1.2500 (to the lowest loss before)" in shown and "seq. length 96" in shown
    assert "spikes      1 of the gradient norm, the last one at step 5" in shown and "cost        $30.00" in shown


@pytest.mark.parametrize("end", ["killed", "goes on", "ended"])
def test_the_cost_of_a_resumed_run_is_that_of_its_page(tmp_path, end):
    """All legs are paid for, and no time between them."""
    now = time.time()
    started, ended = {"event": "started", "step": 40, "time": now - 50}, {"event": "ended", "exit_code": 0}
    ended |= {"attempt_start_step": 40, "last_step": 42, "time": now - 25}
    steps = [{"step": step, "loss": 2.0, "tokens": 100 * step, "step_s": 6.0} for step in (41, 42)]
    first = [*run_files().lines, {"event": "notice", "text": "saved", "time": 1020.0}]
    lines = [*first, started, *steps, *([ended] if end == "ended" else [])]
    write(tmp_path, lines, summary={"exit_code": 0} if end == "ended" else None)
    (tmp_path / "config.json").write_text(json.dumps({"monitor": {"dollars_per_hour": 3600.0}}))
    with (tmp_path / ".lock").open("w") as lock:
        if end == "goes on":
            fcntl.flock(lock, fcntl.LOCK_EX)
        facts, page = read_facts(tmp_path), make_page([read_run(tmp_path)])
    shown = draw_lines(watched(lines), facts, Screen(width=80, height=50), status="")
    [cost] = [float(line.split("$")[1]) for line in shown if line.startswith("cost")]
    seconds = {"killed": 20 + 12, "goes on": 20 + 50, "ended": 20 + 25}[end]
    assert cost == pytest.approx(seconds, abs=5.0 if end == "goes on" else 0.01)
    assert float(page.runs[0].figures["dollars so far"]) == pytest.approx(cost, abs=5.0 if end == "goes on" else 0.01)


@given(st.integers(20, 140), st.integers(1, 60), st.lists(st.floats(), max_size=400), st.booleans())
def test_every_screen_is_large_enough(width, height, losses, has_blocks):
    run = watched([*run_files(losses=losses or [math.nan]).lines, CHANGE | {"why": "long " * 50}, RETURN])
    screen = Screen(width=width, height=height, has_blocks=has_blocks)
    lines = draw_lines(run, FolderFacts(name="name " * 10, num_steps=500), screen, status="running")
    assert max(map(len, lines)) <= width and 1 <= len(lines) <= max(1, height - 1)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 5))
def test_a_curve_is_full_at_its_highest_value_and_never_empty(values, rows):
    drawn = [row.ljust(len(values)) for row in draw_curve(values, width=300, rows=rows)]
    assert len(drawn) == rows
    highest, lowest = values.index(max(values)), values.index(min(values))
    if max(values) > min(values):
        assert drawn[0][highest] == "█" and drawn[-1][lowest] in (BLOCKS[1] if rows > 1 else BLOCKS[1:])
    assert " " not in drawn[-1]


def test_a_curve_without_values_or_blocks():
    assert draw_curve([math.nan, math.inf], width=9, rows=2) == []
    assert draw_curve([1.0, math.nan, 2.0], width=9, rows=1, blocks=ASCII_BLOCKS) == [". #"]


def test_it_ends_with_the_run(tmp_path):
    write(tmp_path, run_files().lines[:1])
    lines = [*run_files().lines, CHANGE, RETURN]
    time = FakeTime(lambda: write(tmp_path, lines), lambda: write(tmp_path, lines, summary=SUMMARY))
    assert watcher(tmp_path, time, stream := io.StringIO()).run() == 3
    said = stream.getvalue().splitlines()
    assert said[0].endswith("no step yet, waiting for the first") and said[1].startswith("step 7: lost rank 3")
    assert said[2] == "step 9: worker 4 (pp1 dp1 tp0) joins in 0.88 s" and said[3].startswith("step 40/80 (50%)  loss")
    assert said[4:] == ["the run has ended with exit code 3: too many workers lost"]


def test_a_run_that_died_is_reported_and_one_that_is_slow_is_not(tmp_path):
    write(tmp_path, run_files().lines)
    time = FakeTime()
    assert watcher(tmp_path, time, stream := io.StringIO()).run() == 1
    assert "the run has died after step 40" in stream.getvalue() and time.now == DEAD_AFTER_S + 1
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = [lambda: None] * 60 + [lambda: write(tmp_path, run_files().lines, summary={"exit_code": 0})]
        assert watcher(tmp_path, time := FakeTime(*ended), io.StringIO()).run() == 0 and time.now == 61


def test_a_run_that_begins_again_is_shown_from_its_start(tmp_path):
    write(tmp_path, run_files(40).lines)

    def begin_again():
        os.rename(tmp_path / "metrics.jsonl", tmp_path / "old.jsonl")
        write(tmp_path, run_files(3).lines, summary={"exit_code": 0})

    assert watcher(tmp_path, FakeTime(begin_again), stream := io.StringIO()).run() == 0
    assert [line.split()[1] for line in stream.getvalue().splitlines()[:2]] == ["40/80", "3/80"]


def test_the_screen_is_drawn_in_place(monkeypatch):
    run, facts = watched(run_files().lines), FolderFacts(name="a")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.delenv("NO_COLOR", raising=False)
    display = ScreenDisplay(stream := io.StringIO())
    display.show(run, facts, status="running")
    first = stream.getvalue()
    assert first.startswith("\x1b[J\x1b[1ma") and first.isascii()  # a stream that names no encoding has no blocks
    monkeypatch.setenv("COLUMNS", "20")
    display.show(run, facts, status="running")
    wrapped = sum(-(-len(line) // 20) for line in plain(first).splitlines())
    assert stream.getvalue()[len(first) :].startswith(f"\x1b[{wrapped}A\r\x1b[J")
    monkeypatch.setenv("NO_COLOR", "1")
    ScreenDisplay(stream := io.StringIO()).show(run, facts, status="running")
    assert "\x1b[" not in stream.getvalue().removeprefix("\x1b[J")


def plain(text):
    for code in ("\x1b[J", "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[33m"):
        text = text.replace(code, "")
    return text


def test_checkpoints_and_uploads_are_found(tmp_path):
    write(tmp_path, run_files().lines)
    (tmp_path / "config.json").write_text(json.dumps({"checkpoint": {"directory": str(tmp_path / "saved")}}))
    (tmp_path / "saved" / "step-00000020").mkdir(parents=True)
    (tmp_path / "uploads.jsonl").write_text('{"event": "uploaded", "step": 10, "bytes": 5}\n')
    facts = read_facts(tmp_path)
    assert facts.checkpoint_step == 20 and facts.checkpoint_age_s >= 0 and facts.uploads.newest_step == 10
    lines = draw_lines(watched(run_files().lines), facts, Screen(width=80, height=40), status="")
    assert "checkpoint  step 20, 0:00 ago" in lines and "upload      step 10" in lines


def test_results_of_checkpoints_are_shown_as_they_come(tmp_path):
    lines, damaged = run_files().lines, tmp_path / "evaluations" / "wiki" / "step-00000030.json"
    restart = {"event": "restart", "step": 15, "lost_steps": 5, "time": NOON.timestamp() + 60}
    more = [*lines, restart, *lines[16:]]
    write(tmp_path, lines)
    figures = {"loss": 2.0, "loss_stderr": 0.5, "perplexity": 7.4}
    actions = [partial(publish, tmp_path, "wiki", step, {"a.txt": figures | {"loss": 40 / step}}) for step in (10, 20)]
    actions += [
        lambda: write(tmp_path, more),
        lambda: damaged.write_text("{"),
        lambda: write(tmp_path, more, summary={"exit_code": 0}),
    ]
    time = FakeTime(*actions)
    assert watcher(tmp_path, time, stream := io.StringIO()).run() == 0
    said = [line for line in stream.getvalue().splitlines() if line.startswith("evaluated")]
    assert said[:-1] == [
        "evaluated step 10, wiki: a.txt, loss 4.0000 ± 0.5000",
        "evaluated step 20, wiki: a.txt, loss 2.0000 ± 0.5000",
        "evaluated step 10, wiki: a.txt, loss 4.0000 ± 0.5000",  # the run has left step 20 behind
    ]
    assert "wiki/step-00000030.json is not the result of an evaluation" in said[-1]
    damaged.unlink()
    facts = read_facts(tmp_path, NewestResults(tmp_path).read([]))
    shown = draw_lines(watched(lines), facts, Screen(width=80, height=40), status="")
    assert "evaluated   step 20, wiki: a.txt, loss 2.0000 ± 0.5000" in shown


def test_mistakes_of_watchers_are_named(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "nothing: not a folder" in capsys.readouterr().err
    write(tmp_path, run_files().lines, summary=SUMMARY)
    with PageServer(tmp_path, port=0) as server:
        port = server.address.rpartition(":")[2].strip("/")
        assert main([str(tmp_path), "--serve", port]) == 2
    assert f"--serve {port}: can't listen there" in capsys.readouterr().err
    assert main([str(tmp_path), "--serve"]) == 3
    assert "serving the page of the run at http://127.0.0.1:" in capsys.readouterr().out


def test_the_page_is_served_to_this_machine_alone_and_again_when_it_changes(tmp_path):
    write(tmp_path, [{"event": "started", "step": 0, "time": 1.0}])
    with PageServer(tmp_path, port=0) as server:
        assert server.address.startswith("http://127.0.0.1:")
        assert "holds no step yet" in fetch(server.address)
        before = fetch(f"{server.address}version")
        write(tmp_path, run_files().lines)
        version, page = fetch(f"{server.address}version"), fetch(server.address)
        assert version != before and f'data-version="{version}"' in page and "connect-src 'self'" in page
        assert fetch(server.address) == page
        for path, headers, code in (("config.json", {}, 404), ("../x", {}, 404), ("", {"Host": "evil.example"}, 403)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                fetch(server.address + path, headers)
            assert refused.value.code == code


def fetch(address, headers=None):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers or {}), timeout=300) as answer:
        return answer.read().decode()
