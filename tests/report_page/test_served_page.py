"""The page in a real browser: a served one takes over new figures in place; a screen reader finds all of it."""

import json
import shutil

import pytest

from parallel3d.report_page.html_page import render_page
from parallel3d.report_page.page_data import make_page
from parallel3d.report_page.page_server import PageServer
from parallel3d.report_page.timeline_chart import plan_timeline
from tests.report_page.test_page_data import CHANGE, run_files
from tests.report_page.test_timeline_chart import config
from tests.report_page.test_watch import EVALUATION, write
from tests.support.browser import Browser
from tests.support.processes import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium"),
]
CHARTS = ["Loss", "Loss ratio: loss / lowest loss before", "Gradient norm", "Time of a step", "Replicas of each stage"]
STATE = """JSON.stringify([scrollY, document.querySelector("details").open, document.activeElement.closest("figure")
  ?.dataset.chart, document.querySelector("figure output").textContent.trim()])"""
SHOWN = "step 60: training 6; evaluation 4.5 at step 20"
FOCUSED = "document.activeElement.tagName"


def test_a_served_page_follows_its_run(tmp_path):
    write(tmp_path, run_files(1).lines[:1])
    with PageServer(tmp_path, port=0) as server, Browser(tmp_path / "profile") as browser:
        browser.call("Page.navigate", url=server.address)
        wait_for(lambda: "holds no step yet" in (browser.evaluate("document.body?.textContent") or ""), "the page")
        write(tmp_path, [*run_files(40).lines, EVALUATION])
        loaded = "document.readyState == 'complete' && document.querySelector('.status')?.textContent"
        wait_for(lambda: browser.evaluate(loaded), "the first step")
        opened = "document.querySelector('details').open = true; document.querySelector('figure svg').focus()"
        browser.evaluate(f"{opened}; scrollTo(0, 300)")
        write(tmp_path, [*run_files(60, losses=[6.0] * 60).lines, EVALUATION])
        shown = (
            "document.querySelector('.status').textContent.includes('60 of 80') && !!document.querySelector('output')"
        )
        wait_for(lambda: browser.evaluate(shown), "the new steps")
        assert json.loads(browser.evaluate(STATE)) == [300, True, "loss", SHOWN]
        assert browser.evaluate("document.querySelectorAll('#data').length") == 1
        assert browser.errors() == []


def test_a_screen_reader_and_a_keyboard_find_everything(tmp_path):
    plan = plan_timeline(config(pp_size=2))
    results = {"prose": [{"step": 20, "tokens": 9, "results": {"a.txt": {"loss": 4.5, "loss_stderr": 0.125}}}]}
    more = {"config": {"run": {"num_steps": 80}}, "results": results}
    files = run_files(plan=plan, events=[CHANGE, EVALUATION], **more)
    (tmp_path / "page.html").write_text(render_page(make_page([files]), now_s=0.0))
    with Browser(tmp_path / "profile") as browser:
        browser.call("Page.navigate", url=f"file://{tmp_path}/page.html")
        wait_for(lambda: browser.evaluate("!!window.startCharts && document.readyState == 'complete'"), "the page")
        names = browser.names()
        assert names["image"] == [*CHARTS, "prose: a.txt", "Planned pipeline"]
        assert names["table"] == ["Figures", "Newest results", "Changes of membership"]
        assert names["columnheader"] == ["step", "what", "replicas of each stage", "seconds", "loss ratio"]
        assert {"tokens", "prose: a.txt, loss"} <= {*names["rowheader"]} and "Planned pipeline" in names["region"]
        stops = []
        for _ in range(len(CHARTS) + 5):
            browser.press("Tab")
            stops.append(browser.evaluate(FOCUSED))
        assert stops == ["svg"] * (len(CHARTS) + 1) + ["DIV"] + ["SUMMARY"] * 3
        assert browser.errors() == []
