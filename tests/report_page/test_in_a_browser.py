"""The page in a real browser, without a display: no error, charts that answer, nothing wider than a phone."""

import json
import shutil
import subprocess

import pytest

from parallel3d.report_page.html_page import render_page
from parallel3d.report_page.page_data import make_page
from parallel3d.report_page.timeline_chart import plan_timeline
from tests.report_page.test_page_data import CHANGE, MARKUP, run_files
from tests.report_page.test_timeline_chart import config
from tests.support.browser import FLAGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium"),
]
ONCE = ("--virtual-time-budget=5000", "--dump-dom")
FIRST = "<script>window.errors = []; window.onerror = (text) => window.errors.push(text);</script>"
LAST = """<script>
const found = { errors: window.errors, charts: [], alerts: window.alerted || 0 };
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const svg = figure.querySelector("svg"), output = figure.querySelector("output");
  svg.dispatchEvent(new Event("focus"));
  svg.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
  const first = output.textContent;
  svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  const box = svg.getBoundingClientRect();
  const second = output.textContent;
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right, clientY: box.top + 5 }));
  found.charts.push({ name: figure.dataset.chart, first, second, last: output.textContent });
}
Object.assign(document.body.style, { width: "360px", margin: "0" });
found.widths = [...document.querySelectorAll("figure[data-chart] svg")].map((each) => each.clientWidth);
found.wide = [...document.querySelectorAll("body *")]
  .filter((each) => !each.closest(".scroll, pre"))
  .filter((each) => each.getBoundingClientRect().right > 361)
  .map((each) => each.tagName);
const told = document.createElement("pre");
told.id = "found";
told.textContent = JSON.stringify(found);
document.body.append(told);
</script>"""

LONG = {"command_line": ["x" * 300, "y"], "host": "z" * 300}


def opened(tmp_path, page):
    text = page.replace("<body>", f"<body>{FIRST}").replace("</body>", f"{LAST}</body>")
    (tmp_path / "page.html").write_text(text)
    done = subprocess.run(
        ["chromium", *FLAGS, *ONCE, f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/page.html"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert 'id="found"' in done.stdout, done.stderr
    return json.loads(done.stdout.split('id="found">')[1].split("</pre>")[0].replace("&lt;", "<").replace("&gt;", ">"))


def test_one_run(tmp_path):
    plan = plan_timeline(config(pp_size=4, micro=64))
    files = run_files(plan=plan, name=f"{MARKUP} {'long' * 30}", events=[CHANGE], environment=LONG)
    found = opened(tmp_path, render_page(make_page([files]), now_s=0.0))
    assert found["errors"] == [] and found["alerts"] == 0 and found["wide"] == []
    assert all(0 < width <= 360 for width in found["widths"])
    charts = {chart["name"]: chart for chart in found["charts"]}
    assert [*charts] == ["loss", "loss_ratio", "grad_norm", "step_s", "widths-0"]
    assert (charts["loss"]["first"], charts["loss"]["second"]) == ("step 1: 6", "step 2: 5.9")
    assert charts["grad_norm"]["last"].endswith(" 41; spikes 41")
    assert charts["widths-0"]["first"] == "step 1: stage 0 2; stage 1 2"
    assert charts["widths-0"]["last"] == "step 40: stage 0 2; stage 1 1"


def test_several_long_runs(tmp_path):
    runs = [run_files(name=name, losses=[float(step % 7) + 1 for step in range(2000)]) for name in ("a", "b", "c")]
    found = opened(tmp_path, render_page(make_page(runs), now_s=0.0))
    assert found["errors"] == [] and found["wide"] == []
    assert found["charts"][0]["first"].startswith("step 7: a, training 4 (1 to 7); b, training 4 (1 to 7); c, ")


def test_results_are_read_with_their_standard_errors(tmp_path):
    def rows(shift):
        losses = [(10, 5.25 + shift, 0.125), (20, 4.5 + shift, None)]
        return [
            {"step": step, "tokens": 9, "results": {f"{'long' * 30}.txt": {"loss": loss, "loss_stderr": error}}}
            for step, loss, error in losses
        ]

    files = run_files(name="a", results={"prose": rows(0.0)})
    found = opened(tmp_path, render_page(make_page([files]), now_s=0.0))
    assert found["errors"] == [] and found["wide"] == []
    chart = found["charts"][-1]
    assert (chart["name"], chart["first"], chart["last"]) == ("result-0", "step 10: 5.25 ± 0.125", "step 20: 4.5")
    both = [files, run_files(name="b", results={"prose": rows(1.0)[:1]})]
    chart = opened(tmp_path, render_page(make_page(both), now_s=0.0))["charts"][-1]
    assert chart["first"] == "step 10: a 5.25 ± 0.125; b 6.25 ± 0.125"
    assert chart["last"] == "step 20: a 4.5; b 6.25 ± 0.125 at step 10"
