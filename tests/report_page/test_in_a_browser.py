"""The page in a real browser, without a display: no error, charts that answer, wide, on a phone and in the dark."""

import shutil

import pytest

from parallel3d.report_page.html_page import render_page
from parallel3d.report_page.page_data import RunFiles, make_page
from parallel3d.report_page.timeline_chart import plan_timeline
from tests.report_page.test_page_data import CHANGE, MARKUP, run_files
from tests.report_page.test_timeline_chart import config
from tests.support.browser import Browser
from tests.support.opened_page import opened
from tests.support.processes import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium"),
]
LONG = {"command_line": ["x" * 300, "y"], "host": "z" * 300}


def test_one_run(tmp_path):
    plan = plan_timeline(config(pp_size=4, micro=64))
    files = run_files(plan=plan, name=f"{MARKUP} {'long' * 30}", events=[CHANGE], environment=LONG)
    charts = opened(tmp_path, render_page(make_page([files]), now_s=0.0))
    assert [*charts] == ["loss", "loss_ratio", "grad_norm", "step_s", "widths-0"]
    assert (charts["loss"]["first"], charts["loss"]["second"]) == ("step 1: 6", "step 2: 5.9")
    assert charts["grad_norm"]["last"].endswith(" 41; spikes 41")
    assert charts["widths-0"]["first"] == "step 1: stage 0 2; stage 1 2"
    assert charts["widths-0"]["last"] == "step 40: stage 0 2; stage 1 1"


def test_several_long_runs(tmp_path):
    runs = [run_files(name=name, losses=[float(step % 7) + 1 for step in range(2000)]) for name in ("a", "b", "c")]
    charts = opened(tmp_path, render_page(make_page(runs), now_s=0.0))
    assert charts["loss"]["first"].startswith("step 7: a, training 4 (1 to 7); b, training 4 (1 to 7); c, ")


def test_results_are_read_with_their_standard_errors(tmp_path):
    def rows(shift):
        losses = [(10, 5.25 + shift, 0.125), (20, 4.5 + shift, None)]
        return [
            {"step": step, "tokens": 9, "results": {f"{'long' * 30}.txt": {"loss": loss, "loss_stderr": error}}}
            for step, loss, error in losses
        ]

    files = run_files(name="a", results={"prose": rows(0.0)})
    chart = opened(tmp_path, render_page(make_page([files]), now_s=0.0))["result-0"]
    assert (chart["first"], chart["last"]) == ("step 10: 5.25 ± 0.125", "step 20: 4.5")
    both = [files, run_files(name="b", results={"prose": rows(1.0)[:1]})]
    chart = opened(tmp_path, render_page(make_page(both), now_s=0.0))["result-0"]
    assert chart["first"] == "step 10: a 5.25 ± 0.125; b 6.25 ± 0.125"
    assert chart["last"] == "step 20: a 4.5; b 6.25 ± 0.125 at step 10"


def test_the_planned_bubble_stands_out_from_the_measured_one(tmp_path):
    """On the page of one run; where several are compared, each has its colour."""
    bubbles = {"bubble": 0.5, "planned_bubble": 0.25}
    lines = [{**line, **bubbles} if "loss" in line else line for line in run_files().lines]
    runs = [RunFiles(name=name, lines=lines) for name in "ab"]
    strokes = "[...document.querySelectorAll('figure[data-chart=bubble] path')].map((e) => getComputedStyle(e).stroke)"
    legend = "getComputedStyle(document.querySelector('.swatch.dashed')).backgroundColor"

    def colours(browser, shown, path):
        path.write_text(render_page(make_page(shown), now_s=0.0))
        browser.call("Page.navigate", url=f"file://{path}")
        wait_for(lambda: browser.evaluate("location.pathname") == f"{path}", "the page")
        wait_for(lambda: browser.evaluate("!!window.startCharts"), "its charts")
        return browser.evaluate(strokes), browser.evaluate(legend)

    with Browser(tmp_path / "profile") as browser:
        (measured, planned), sign = colours(browser, runs[:1], tmp_path / "one.html")
        assert planned == sign != measured
        (measured_a, measured_b, planned_a, planned_b), sign = colours(browser, runs, tmp_path / "both.html")
        assert (planned_a, planned_b) == (measured_a, measured_b) and planned_a == sign != planned_b


def test_no_error_escapes(tmp_path):
    """What the tests above rely on: an error of each kind is found in a page that makes it."""
    page = render_page(make_page([run_files()]), now_s=0.0)
    kinds = {
        "thrown": "throw new Error('thrown')",
        "logged": "console.error('logged')",
        "rejected": "Promise.reject(new Error('rejected'))",
        "alert: 1": "alert(1)",
        "policy: img-src": "new Image().src = 'https://example.invalid/a.png'",
        "policy: connect-src": "fetch('https://example.invalid/').catch(() => 0)",
    }
    with Browser(tmp_path / "profile") as browser:
        for number, (text, script) in enumerate(kinds.items()):
            path = tmp_path / f"{number}.html"
            path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
            before = len(browser.errors())
            browser.call("Page.navigate", url=f"file://{path}")
            wait_for(lambda before=before: len(browser.errors()) > before, text)
            assert any(text in each for each in browser.errors()[before:]), browser.errors()
