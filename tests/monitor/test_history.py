"""The analysis of a run's lines: by hand, and on runs made to be unstable, or better than another."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.commands.report import main
from parallel3d.monitor.history import MetricsLog, analyse, compare_to_reference

ROOT = Path(__file__).parents[2]


def lines_of(losses, **series):
    rows = zip(losses, *series.values(), strict=True)
    return [
        {"step": step, "loss": loss, "tokens": 100 * step, "step_s": 2.0, **dict(zip(series, values))}
        for step, (loss, *values) in enumerate(rows, 1)
    ]


def evaluations(losses, every=10):
    return [{"event": "evaluation", "step": every * i, "loss": loss} for i, loss in enumerate(losses, 1)]


def test_the_table_of_a_run():
    found = analyse(MetricsLog.of(lines_of([4.0, 3.0, 3.3, 2.5, 5.0, 2.6, None])))
    ratio = found.loss_ratio
    assert (ratio.num_steps, ratio.num_unstable, ratio.num_not_finite, ratio.largest) == (7, 2, 1, 2.0)
    assert found.largest_at == 5 and found.with_variance_norm is None


def test_the_loss_ratio_goes_with_the_variance_after_its_own_step():
    """A line's variance is that before its update: paired with the ratio of the line before, they are the same here."""
    draw = random.Random(2)
    losses = [10.0, *(10.0 + draw.random() for _ in range(300))]
    before = [0.0, *(loss / 10.0 for loss in losses[:-1])]
    found = analyse(MetricsLog.of(lines_of(losses, variance_norm=before, variance_max=[-value for value in before])))
    assert found.with_variance_norm.r == pytest.approx(1.0) and found.with_variance_norm.num_pairs == 299
    assert found.with_variance_max.r == pytest.approx(-1.0)


def test_a_step_that_was_not_measured_gives_no_pair():
    variance = [0.0, 1.0, None, 3.0, 4.0, 5.0]
    found = analyse(MetricsLog.of(lines_of([3.0, 4.0, 5.0, 6.0, 3.5, 3.0], variance_norm=variance)))
    assert found.with_variance_norm.num_pairs == 3  # of the ratios of steps 2 to 5 that of step 2 has no partner


def test_changes_of_membership_are_listed_with_their_effects():
    norms = [1.0] * 25 + [9.0] + [1.0] * 4
    lines = lines_of([3.0] * 26 + [3.3] + [3.0] * 3, grad_norm=norms)
    changes = [{"event": "membership", "step": 26}, {"event": "membership", "step": 27}]
    first, second = analyse(MetricsLog.of([*lines, *changes])).changes
    assert (first.is_spike, first.loss_ratio) == (True, 1.0)
    assert (second.is_spike, second.loss_ratio) == (False, pytest.approx(1.1))


def change(step, before, after):
    return {"event": "membership", "step": step, "who": [], "joined": [], "widths_before": before, "widths": after}


def test_a_restart_and_a_resume_bring_all_replicas_back():
    """Changes in steps that are repeated are taken back; a resume may have another layout."""
    steps = [{"step": step, "loss": 1.0} for step in range(1, 51)]
    start, first, second = {"event": "started", "step": 0}, change(5, [2, 2], [2, 1]), change(8, [2, 1], [1, 1])
    restart = {"event": "restart", "step": 6}
    resume, narrow, other = {"event": "started", "step": 20}, change(7, [2, 2], [1, 2]), change(9, [1, 2], [1, 1])
    begin = [(1, [2, 2]), (5, [2, 1])]
    cases = (
        ([], []),
        ([first, second], [*begin, (8, [1, 1])]),
        ([first, second, restart], [*begin, (7, [2, 2])]),
        ([second, restart], [(1, [2, 1])]),
        ([first, restart, narrow], [*begin, (7, [2, 2]), (7, [1, 2])]),
        ([first, restart, other], [*begin, (7, [1, 2]), (9, [1, 1])]),
        ([first, resume], [*begin, (21, [2, 2])]),
        ([first, resume, change(30, [4], [3])], [*begin, (21, [4, 0]), (30, [3, 0])]),
    )
    for events, expected in cases:
        found = MetricsLog(steps=tuple(steps), events=(start, *events)).widths
        assert found == expected, events


def test_the_last_line_of_a_repeated_step_counts():
    history = MetricsLog.of([{"step": 1, "loss": 3.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}])
    assert history.losses[0] == 2.0 and math.isnan(history.losses[1]) and len(history.steps) == 2


def test_both_readings_of_a_win():
    """Ours is at 3.0 after 20 of the other's 40 steps; at 3000 tokens it is halfway between 3.0 and 2.8."""
    ours = MetricsLog.of([*lines_of([4.0] * 40), *evaluations([4.0, 3.0], every=10), *evaluations([2.8], every=40)])
    theirs = MetricsLog.of([*lines_of([4.0] * 40), *evaluations([5.0, 4.0, 3.5, 3.0])])
    win = compare_to_reference(ours, theirs)
    assert (win.reached.step, win.tokens_saved, win.time_saved) == (20, 0.5, 0.5)
    assert (win.equal_tokens, win.loss, win.reference_loss) == (4000, 2.8, 3.0)
    shorter = MetricsLog.of([*lines_of([4.0] * 30), *evaluations([5.0, 4.0, 3.5])])
    assert (
        compare_to_reference(ours, shorter).loss == pytest.approx(2.9)
        and compare_to_reference(ours, shorter).equal_tokens == 3000
    )
    lost = compare_to_reference(theirs, ours)
    assert lost.reached is None and lost.tokens_saved is None
    assert compare_to_reference(ours, MetricsLog.of(lines_of([1.0]))) is None


def test_a_loss_before_the_first_evaluation_is_unknown():
    early = MetricsLog.of([*lines_of([4.0] * 10), *evaluations([4.0])])
    late = MetricsLog.of([*lines_of([4.0] * 40), *evaluations([3.0], every=40)])
    win = compare_to_reference(early, late)
    assert (win.equal_tokens, win.loss, win.reference_loss) == (1000, 4.0, None)


# --- launch/report.py -------------------------------------------------------------------------------------------------


def write_run(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(
        json.dumps({"optimizer": {"max_grad_norm": 1.0}, "run": {"num_steps": 5000, "evaluate_batches": 2}})
    )
    return folder


def test_the_report_on_the_command_line(tmp_path):
    """Another process, without a display; a run that goes on has no summary yet."""
    norms = [1.0] * 30 + [3.0] + [1.0] * 9
    events = [{"event": "evaluation", "step": 40, "loss": 3.5, "seconds": 1.0}, {"event": "membership", "step": 31}]
    run = write_run(tmp_path / "run", [*lines_of([4.0] * 30 + [6.0] * 10, grad_norm=norms), *events])
    done = subprocess.run(
        [sys.executable, "launch/report.py", str(run)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "steps with loss ratio > 1.2  10 (25.00%)",
        "largest loss ratio           1.500, step 31",
        "gradient spikes by length    1: 1; 100% last one step",
        "change of membership         step 31, loss ratio 1.500, within a gradient spike",
        "50 in 5.0% more time: run.evaluate_every=100 run.evaluate_batches=20 (10 s each; a batch takes 0.5 s)",
        "drawn: loss.png, course.png, instability.png",
    ):
        assert words in done.stdout, done.stdout
    assert (run / "course.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("num_steps", "advice"),
    [
        (400, "6 in 4.5% more time: run.evaluate_every=60 run.evaluate_batches=1"),  # steps of 2 s, a batch of 6 s
        (59, "none: a batch of 6 s is over 5% of all steps"),
    ],
)
def test_a_short_run_is_advised_fewer_evaluations(tmp_path, capsys, num_steps, advice):
    evaluation = {"event": "evaluation", "step": 40, "loss": 3.5, "seconds": 6.0}
    run = write_run(tmp_path / "run", [*lines_of([4.0] * 40), evaluation])
    (run / "config.json").write_text(json.dumps({"run": {"num_steps": num_steps, "evaluate_batches": 1}}))
    assert main([str(run), "--no-charts"]) == 0
    assert f"advised evaluations          {advice}" in capsys.readouterr().out


def test_the_charts_of_a_run_that_goes_on_are_drawn_until_it_is_over(tmp_path, monkeypatch, capsys):
    run, drawn = write_run(tmp_path / "run", lines_of([4.0] * 40)), []

    def wait(seconds):
        drawn.append((run / "course.png").stat().st_size)
        if len(drawn) == 2:
            (run / "summary.json").write_text("{}")

    monkeypatch.setattr("time.sleep", wait)
    assert main([str(run), "--every", "5"]) == 0
    assert len(drawn) == 2 and "steps with loss ratio" in capsys.readouterr().out


def test_the_report_of_two_runs_as_an_object(tmp_path, capsys):
    ours = write_run(tmp_path / "ours", [*lines_of([4.0] * 40), *evaluations([4.0, 3.0])])
    theirs = write_run(tmp_path / "theirs", [*lines_of([4.0] * 40), *evaluations([5.0, 4.0, 3.5, 3.0])])
    assert main([str(ours), "--against", str(theirs), "--json", "--no-charts"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["win"]["tokens_saved"] == 0.5 and facts["best"]["loss"] == 3.0
    assert not (ours / "loss.png").exists()
    assert main([str(ours), "--against", str(theirs), "--no-charts"]) == 0
    told = capsys.readouterr().out
    assert "reaches it at step 20, 2,000 tokens, 40.0 s: saved +50% of the tokens, +50% of the time" in told


@pytest.mark.parametrize("name, words", [("nowhere", "can't read metrics.jsonl"), ("empty", "holds no step yet")])
def test_a_folder_without_a_run_is_one_clear_error(tmp_path, capsys, name, words):
    write_run(tmp_path / "empty", [{"event": "notice", "text": "hello"}])
    assert main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert words in error and name in error and "Traceback" not in error


def test_a_report_of_uploads(tmp_path, capsys):
    """Two sent, a failure that leaves two behind, one of which a later attempt has sent."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of([3.0] * 10)))
    assert main([str(run), "--no-charts"]) == 0
    assert "uploaded" not in capsys.readouterr().out
    events = [
        {"event": "uploaded", "step": 2, "bytes": 1_500_000},
        {"event": "uploaded", "step": 4, "bytes": 1_500_000},
        {"event": "retry", "text": "again"},
        {"event": "failed", "text": "ConnectionError, after 3 retries", "behind": [6, 8]},
        {"event": "uploaded", "step": 8, "bytes": 1_500_000},
        {"event": "removed", "step": 2},
    ]
    (run / "uploads.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "cut')
    assert main([str(run), "--no-charts"]) == 0
    printed = capsys.readouterr().out
    assert "uploaded         3 (4.5 MB), the newest of step 8; 1 retries, 1 failures\n" in printed
    assert "not uploaded     6: ConnectionError, after 3 retries\n" in printed
    assert main([str(run), "--no-charts", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["uploads"]["behind"] == [6]
