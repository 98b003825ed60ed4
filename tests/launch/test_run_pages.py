"""The page of a real run that loses a worker and gets one back: every value on it is one of metrics.jsonl."""

import json
import os
import shutil
import signal

import pytest

from parallel3d.commands.report import main as report
from parallel3d.commands.watch import main as watch
from parallel3d.monitor.run_folder import read_metrics
from tests.launch.test_returning_workers import kill
from tests.support.launch_runs import finish, metrics, start, wait_for_change, wait_for_step
from tests.support.opened_page import opened
from tests.support.page_values import MAX_POINTS, WINDOW, RunValues, check_curves, check_page
from tests.support.processes import wait_for
from tests.support.shown_page import ShownPage, shows

pytestmark = [pytest.mark.slow, pytest.mark.full]
PRICE = 3600.0
"""Dollars an hour: a dollar a second."""
SPIKE = WINDOW + 10
"""Within the run, whose first losses are the highest."""


def test_every_value_is_that_of_the_metrics(config_file, tmp_path, capsys):
    run = tmp_path / "run"
    process = start(
        "--config",
        config_file,
        "run.num_steps=100000",
        "elastic.max_rejoins=3",
        "monitor.page_every_s=0.5",
        "checkpoint.every=5",
    )
    wait_for_step(run, 4)
    kill(run, 3)
    wait_for_change(run, 2)
    wait_for_step(run, max(len(metrics(run)) + 8, 2 * WINDOW))
    wait_for((run / "report.html").exists, "the page of a run that goes on")
    assert "not finished" in (run / "report.html").read_text()
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in out + err, out + err
    page = (run / "report.html").read_text()
    values = check_page(run)
    assert values.evaluations and len(values.checkpoints()) > 1
    assert [sum(len(line[who]) for line in values.changes) for who in ("who", "joined")] == [1, 1]
    assert values.ratios == pytest.approx([ratio for _, ratio in values.column("loss_ratio")], rel=1e-9)
    assert report([str(run), "--html", "--dollars-per-hour", f"{PRICE}"]) == 0
    check_page(run, dollars_per_hour=PRICE)
    check_spikes(run, tmp_path / "spikes")
    if shutil.which("chromium"):
        charts = opened(tmp_path, page)
        assert {*charts} == {*values.curves()}
    assert watch([str(run)]) == 130
    assert f"step {len(metrics(run)):,}/100,000" in capsys.readouterr().out
    assert not [name for name in os.listdir(run) if name.startswith(".report")]


def test_a_run_that_restarts_and_is_resumed(config_file, tmp_path):
    """The only worker of a stage dies in step 8; a second leg goes on after step 15 of 30: what the first one did
    after that was paid for, too."""
    run, seconds = tmp_path / "run", 0.0
    first = ['elastic.faults=[{"rank": 1, "step": 8, "phase": "forward"}]']
    first += ['restart={"max_restarts": 1, "backoff_s": 0.1}']
    options = ("parallel.dp_size=1", "run.num_steps=30", "checkpoint.every=15", f"monitor.dollars_per_hour={PRICE}")
    for changes_of_leg in (first, [f"run.resume={run / 'checkpoints' / 'step-00000015'}"]):
        process = start("--config", config_file, *options, *changes_of_leg)
        code, out, err = finish(process)
        assert code == 0, out + err
        events = [line for line in read_metrics(run / "metrics.jsonl") if "event" in line]
        started = max(line["time"] for line in events if line["event"] == "started")
        seconds += events[-1]["time"] - started
    values = check_page(run, dollars_per_hour=PRICE)
    figures = values.figures(PRICE)
    assert figures["legs (the first one and resumes)"] == 2 and figures["dollars without evaluations"] > 0
    assert figures["restarts"] == 1 and figures["steps lost by restarts"] > 0
    assert values.wall_s() == pytest.approx(seconds, abs=0.002)
    assert values.summary["wall_s"] == pytest.approx(seconds, abs=0.002)


def copy_with_spikes(run, folder):
    """Copies a run, with its steps eight times one after the other and two spikes of loss and of gradient norm."""
    shutil.copytree(run, folder)
    steps, events = metrics(run), [line for line in read_metrics(run / "metrics.jsonl") if "event" in line]
    steps = [{**line, "step": number} for number, line in enumerate(8 * steps, start=1)]
    for step, factor in ((SPIKE - 1, 3.0), (SPIKE, 4.0), (SPIKE + 1, 3.0), (300, 5.0)):
        steps[step - 1] |= {name: factor * steps[step - 1][name] for name in ("loss", "grad_norm")}
    assert len(steps) > MAX_POINTS
    lines = [events[0], *steps, *events[1:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def check_spikes(run, folder):
    """Compares a page with rings and bands: those of a copy of the run."""
    copy_with_spikes(run, folder)
    assert report([str(folder), "--html"]) == 0
    shown, values = ShownPage((folder / "report.html").read_text()), RunValues(folder)
    check_curves(shown, values)
    spikes, rings = values.gradient_spikes(), values.loss_spikes()
    assert SPIKE in [step for step, _ in rings] and any(len(spike) > 1 for spike in spikes)
    assert shows(shown.figures["gradient spikes"], len(spikes)) and len(rings) > 1
    assert shows(shown.figures["steps above 1.2 x lowest loss"], sum(ratio > 1.2 for ratio in values.ratios))
