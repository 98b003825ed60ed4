"""The page of a real run that loses a worker and gets one back: every value on it is one of metrics.jsonl."""

import json
import math
import os
import re
import shutil
import signal
from html.parser import HTMLParser

import pytest

from parallel3d.commands.report import main as report
from parallel3d.commands.watch import main as watch
from parallel3d.monitor.run_folder import read_metrics
from parallel3d.report_page.page_data import SOURCES
from parallel3d.report_page.scales import MAX_POINTS
from tests.launch.test_returning_workers import changes, kill
from tests.report_page.test_in_a_browser import opened
from tests.support.launch_runs import finish, metrics, start, wait_for_change, wait_for_step
from tests.support.processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.full]
FACTORS = {"memory_bytes": 1e-6}


def windows(values):
    """Means of as few steps as make at most MAX_POINTS."""
    size = math.ceil(len(values) / MAX_POINTS)
    cut = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(each) / len(each) for each in cut]


class Cells(HTMLParser):
    """The rows of a page's tables, by caption."""

    def __init__(self, page):
        super().__init__()
        self.tables, self._table, self._row, self._part = {}, [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "caption":
            self._table = []
        elif tag == "tr":
            self._row = []
            self._table.append(self._row)
        elif tag in ("th", "td"):
            self._row.append("")
        self._part = tag

    def handle_endtag(self, tag):
        self._part = "" if tag in ("caption", "th", "td") else self._part

    def handle_data(self, data):
        if self._part == "caption":
            self.tables[data] = self._table
        elif self._part in ("th", "td"):
            self._row[-1] += data


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
    wait_for_step(run, len(metrics(run)) + 8)
    wait_for((run / "report.html").exists, "the page of a run that goes on")
    assert "not finished" in (run / "report.html").read_text()
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in out + err, out + err
    page = (run / "report.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    charts = {chart["name"]: chart for chart in data["charts"]}
    check_curves(charts, metrics(run))
    check_events(charts, page, run)
    check_figures(run)
    if shutil.which("chromium"):
        found = opened(tmp_path, page)
        assert found["errors"] == [] and found["wide"] == [] and [each["name"] for each in found["charts"]] == [*charts]
    assert watch([str(run)]) == 130
    assert f"step {len(metrics(run)):,}/100,000" in capsys.readouterr().out
    assert not [name for name in os.listdir(run) if name.startswith(".report")]


def test_a_resumed_run_costs_what_both_of_its_legs_have_cost(config_file, tmp_path):
    """The second leg goes on after step 10 of 12: what the first one did after that was paid for, too."""
    run, seconds = tmp_path / "run", 0.0
    for changes_of_leg in (["checkpoint.every=10"], [f"run.resume={run / 'checkpoints' / 'step-00000010'}"]):
        process = start("--config", config_file, "monitor.dollars_per_hour=3600", *changes_of_leg)
        code, out, err = finish(process)
        assert code == 0, out + err
        events = [line for line in read_metrics(run / "metrics.jsonl") if "event" in line]
        started = max(line["time"] for line in events if line["event"] == "started")
        seconds += events[-1]["time"] - started
    summary = json.loads((run / "summary.json").read_text())
    assert summary["wall_s"] == pytest.approx(seconds, abs=0.002)
    shown = dict(Cells((run / "report.html").read_text()).tables["Figures"])
    assert shown["dollars so far"] == f"{summary['wall_s']:,.2f}" and shown["wall-clock time"].startswith(
        f"{summary['wall_s']:,.1f}"
    )
    assert float(shown["dollars without evaluations"]) > 0


def check_curves(charts, lines):
    for name in ("loss", *SOURCES):
        source = SOURCES.get(name)
        values = [FACTORS.get(name, 1.0) * line[name] for line in lines if line.get(name) is not None]
        if source and source.only_if_it_changes:
            assert len({*values}) == 1 and name not in charts
            continue
        curve = charts[name]["series"][0]["curve"]
        assert curve["mean"] == pytest.approx(windows(values), rel=1e-12), name
        assert (min(curve["low"]), max(curve["high"])) == (min(values), max(values)), name
        assert curve["x"][-1] == [line["step"] for line in lines if line.get(name) is not None][-1]


def check_events(charts, page, run):
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [(event["step"], event["loss"]) for event in events if event.get("event") == "evaluation"]
    dots = charts["loss"]["series"][1]["curve"]
    assert [*zip(dots["x"], dots["mean"])] == evaluations and evaluations
    loss, comeback = changes(run)
    assert [step for step, _ in charts["loss"]["marks"]] == [loss["step"], comeback["step"]]
    for stage, series in enumerate(charts["widths-0"]["series"]):
        assert series["curve"]["mean"][1:3] == [loss["widths"][stage], comeback["widths"][stage]]
    table = page.split("<caption>Changes of membership</caption>")[1].split("</table>")[0]
    rows = [re.findall(r"<td role=cell>(.*?)</td>", row) for row in table.split("<tr role=row>")[2:]]
    for row, event in zip(rows, (loss, comeback), strict=True):
        seconds = sum(event[name] or 0.0 for name in ("detect_s", "agree_s", "repair_s", "regroup_s"))
        assert row[0] == str(event["step"]) and float(row[3]) == pytest.approx(seconds, rel=1e-3)


def check_figures(run):
    """The page with dollars: its table of figures holds what summary.json and metrics.jsonl do."""
    assert report([str(run), "--html", "--dollars-per-hour", "3600"]) == 0
    tables = Cells((run / "report.html").read_text()).tables
    shown = {name: value.replace(",", "") for name, value in tables["Figures"]}
    summary, lines = json.loads((run / "summary.json").read_text()), metrics(run)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = {event["event"]: event["time"] for event in events if event.get("event") in ("started", "ended")}
    evaluations = [event for event in events if event.get("event") == "evaluation"]
    best = min(evaluations, key=lambda event: event["loss"])
    changed = changes(run)
    assert int(shown["steps"]) == lines[-1]["step"] == summary["last_step"]
    assert int(shown["tokens"]) == lines[-1]["tokens"]
    assert float(shown["final loss"]) == pytest.approx(summary.get("final_loss", lines[-1]["loss"]), abs=5e-5)
    assert shown["best evaluation"] == f"{best['loss']:.4f} (step {best['step']})"
    speed = summary.get("tokens_per_s", lines[-1]["mean_tokens_per_s"])
    assert float(shown["tokens/s"]) == pytest.approx(speed, abs=0.5)
    assert int(shown["workers lost"]) == sum(len(event["who"]) for event in changed) == 1
    assert int(shown["workers joined"]) == sum(len(event["joined"]) for event in changed) == 1
    parts = ("detect_s", "agree_s", "repair_s", "regroup_s")
    cost_s = sum(event[name] or 0.0 for event in changed for name in parts)
    assert float(shown["seconds that changes have cost"]) == pytest.approx(cost_s, abs=0.005)
    wall_s = times["ended"] - times["started"]
    assert float(shown["wall-clock time"].removesuffix(" s")) == pytest.approx(wall_s, abs=0.06)
    productive_s = sum(line.get("step_s", 0.0) for line in lines) + sum(event["seconds"] for event in evaluations)
    share = float(shown["goodput (productive share of the time)"].removesuffix("%")) / 100
    assert share == pytest.approx(productive_s / wall_s, abs=6e-4)
    assert float(shown["dollars so far"]) == pytest.approx(wall_s, abs=0.006)
    net = wall_s - sum(event["seconds"] for event in evaluations)
    assert float(shown["dollars without evaluations"]) == pytest.approx(net, abs=0.006)
    assert float(shown["dollars for a million tokens"]) == pytest.approx(wall_s / lines[-1]["tokens"] * 1e6, rel=0.01)
    texts = [event["text"] for event in events if event.get("event") == "notice"]
    saved = [re.match(r"saved step (\d+): .*, ([\d.]+) MB", text) for text in texts]
    rows = {row[0]: row[1] for row in tables["Checkpoints"][1:]}
    assert rows == {found[1]: found[2] for found in saved if found} and len(rows) > 1
    assert shown["checkpoints saved"].startswith(f"{len(rows)} ")
    assert [text for _, text in tables["Messages"][1:]] == texts
