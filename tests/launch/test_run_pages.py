"""The page of a real run that loses a worker and gets one back: every value on it is one of metrics.jsonl."""

import json
import math
import os
import re
import shutil
import signal

import pytest

from parallel3d.commands.watch import main as watch
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


def test_every_value_is_that_of_the_metrics(config_file, tmp_path, capsys):
    run = tmp_path / "run"
    process = start(
        "--config", config_file, "run.num_steps=100000", "elastic.max_rejoins=3", "monitor.page_every_s=0.5"
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
    if shutil.which("chromium"):
        found = opened(tmp_path, page)
        assert found["errors"] == [] and found["wide"] == [] and [each["name"] for each in found["charts"]] == [*charts]
    assert watch([str(run)]) == 130
    assert f"step {len(metrics(run)):,}/100,000" in capsys.readouterr().out
    assert not [name for name in os.listdir(run) if name.startswith(".report")]


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
