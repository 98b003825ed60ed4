"""What pages and reports show of evaluated checkpoints is what the files of results say."""

import json
import math
import os
from datetime import UTC, datetime

import pytest

from parallel3d.commands.report import main as report
from parallel3d.evaluation.results import GroupResult
from parallel3d.evaluation.rows import RowScore
from parallel3d.evaluation.saved_results import ResultFolder
from parallel3d.report_page.html_page import OPEN_RESULT_CHARTS, render_page
from parallel3d.report_page.page_data import MAX_RESULTS, make_page
from parallel3d.report_page.page_file import read_run
from parallel3d.report_page.page_server import RenderedRun
from parallel3d.report_page.scales import MAX_POINTS
from tests.report_page.test_page_data import MARKUP, run_files

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TASK = {"acc": 0.25, "acc_stderr": 0.0625, "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.125}


def text_result(name, step, num_rows=5):
    scores = [RowScore(log_prob=-50.0 / step - row, num_targets=8 + row, is_greedy=row == 1) for row in range(num_rows)]
    return GroupResult.of(name, scores, words=20, num_bytes=100)


def results_at(step):
    """By set: two files and all of them, last words, and a task."""
    files = [text_result("a.txt", step), text_result("b.txt", step + 1)]
    texts = {each.name: each.text_figures() for each in (*files, GroupResult.sum_of("all", files))}
    return {
        "files": texts,
        "words": {"words.jsonl": text_result("words.jsonl", step).last_word_figures()},
        "tasks": {MARKUP: TASK},
    }


def publish(run, name, step, results, saved_at=NOON):
    """A result, where and as `parallel3d evaluate --follow` leaves it."""
    folder = ResultFolder(run, name)
    folder.prepare({"files": [name]})
    written = folder.path / ".result.json"
    model = {"step": step, "tokens": 100 * step, "saved_at": saved_at.isoformat()}
    written.write_text(json.dumps({"model": model, "results": results}))
    folder.publish(written, step)


def write_run(folder, steps=(), events=()):
    folder.mkdir(exist_ok=True)
    lines = [*run_files().lines, *events]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in steps:
        for name, results in results_at(step).items():
            publish(folder, name, step, results)
    return folder


def figures_in(folder):
    """(set, text, figure, step) -> value and standard error, straight from the files."""
    found = {}
    for path in folder.glob("evaluations/*/step-*.json"):
        saved = json.loads(path.read_text())
        for group, figures in saved["results"].items():
            for figure, value in figures.items():
                error = figures.get("exact_match_stderr,strict" if "," in figure else f"{figure}_stderr")
                found[path.parent.name, group, figure, saved["model"]["step"]] = value, error
    return found


def embedded(text):
    return json.loads(text.split('id="data">')[1].split("</script>")[0])["charts"]


def test_every_value_is_one_of_the_files(tmp_path):
    run = write_run(tmp_path / "run", steps=(10, 20, 40))
    files, page = figures_in(run), make_page([read_run(run)])
    charts = {chart["title"] + ", " + chart["unit"]: chart for chart in embedded(render_page(page, now_s=0.0))}
    for title, key in (
        ("files: a.txt, loss in nats per token", ("files", "a.txt", "loss")),
        ("files: b.txt, loss in nats per token", ("files", "b.txt", "loss")),
        ("files: all, loss in nats per token", ("files", "all", "loss")),
        ("words: words.jsonl, accuracy", ("words", "words.jsonl", "accuracy")),
        (f"tasks: {MARKUP}, acc", ("tasks", MARKUP, "acc")),
        (f"tasks: {MARKUP}, exact match,strict", ("tasks", MARKUP, "exact_match,strict")),
    ):
        [series] = charts.pop(title)["series"]
        assert series["curve"]["x"] == [10, 20, 40]
        shown = [*zip(series["curve"]["mean"], series["errors"])]
        assert shown == [files[*key, step] for step in (10, 20, 40)], title
        assert all(error for _, error in shown)
    assert not [title for title in charts if ": " in title.removeprefix("Loss ratio: ")]

    rows = [list(row) for row in page.runs[0].results]
    sizes = ("tokens", "words", "bytes", "passages")
    wanted = {key: found for key, found in files.items() if key[2] not in sizes and "stderr" not in key[2]}
    assert len(rows) == len(wanted) == page.runs[0].num_results
    for (name, group, figure, step), (value, error) in wanted.items():
        cells = [f"{step}", f"{100 * step:,}", f"{name}: {group}", figure.replace("_", " ")]
        assert [*cells, f"{value:,.4f}", "" if error is None else f"{error:.4f}"] in rows
    assert [int(row[0]) for row in rows] == sorted(int(row[0]) for row in rows)


def test_the_newest_results_are_those_of_the_last_checkpoint(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=(10, 40))
    files, newest = figures_in(run), dict(make_page([read_run(run)]).newest_results)
    assert [*newest][:3] == ["files: a.txt, loss", "files: a.txt, perplexity", "files: b.txt, loss"]
    loss, error = files["files", "a.txt", "loss", 40]
    perplexity, _ = files["files", "a.txt", "perplexity", 40]
    assert newest["files: a.txt, loss"] == f"{loss:.4f} ± {error:.4f} (step 40)"
    assert newest["files: a.txt, perplexity"] == f"{perplexity:,.4f} (step 40)"
    assert newest[f"tasks: {MARKUP}, exact match,strict"] == "0.5000 ± 0.1250 (step 40)"
    assert report([str(run), "--no-charts"]) == 0
    out = capsys.readouterr().out
    assert f"evaluated on files           step 40, a.txt: loss {loss:.4f} ± {error:.4f}, perplexity " in out
    assert f"evaluated on tasks           step 40, {MARKUP}: acc 0.2500 ± 0.0625, exact match,strict 0.5000" in out
    assert report([str(run), "--no-charts", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["evaluations"]
    assert {name: (each["step"], each["tokens"]) for name, each in shown.items()} == dict.fromkeys(shown, (40, 4000))
    assert {name: each["results"] for name, each in shown.items()} == results_at(40)


def test_several_runs_stand_side_by_side(tmp_path):
    runs = [
        write_run(tmp_path / "a", steps=(10, 20)),
        write_run(tmp_path / "b", steps=(30,)),
        write_run(tmp_path / "c"),
    ]
    publish(runs[1], "more", 40, {"new.txt": text_result("new.txt", 40).text_figures()})
    page = make_page([read_run(run) for run in runs])
    text = render_page(page, now_s=0.0)
    charts = {chart["title"]: chart for chart in embedded(text)}
    labels = [(series["run"], series["label"]) for series in charts["files: a.txt"]["series"]]
    assert labels == [(0, "a"), (1, "b")]
    assert [series["run"] for series in charts["more: new.txt"]["series"]] == [1]
    newest = {row[0]: row[1:] for row in page.newest_results}
    assert [cell[-9:] for cell in newest["files: all, loss"]] == ["(step 20)", "(step 30)", ""]
    assert [bool(cell) for cell in newest["more: new.txt, loss"]] == [False, True, False]
    head = text.split("<caption>Newest results</caption>")[1].split("</thead>")[0]
    assert head.count("role=columnheader") == 3 and text.count("<caption>Results of checkpoints</caption>") == 2


def test_without_results_nothing_is_shown(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    before = make_page([read_run(run)])
    ResultFolder(run, "empty").prepare({})
    assert make_page([read_run(run)]).result_charts == before.result_charts == before.newest_results == ()
    text = render_page(before, now_s=0.0)
    assert "h-results" not in text and "Results of checkpoints" not in text and text.count(MARKUP) == 0
    assert report([str(run), "--no-charts"]) == 0 and "evaluated on" not in capsys.readouterr().out


def test_results_that_a_run_has_left_behind_are_not_shown(tmp_path, capsys):
    restart = {"event": "restart", "step": 15, "lost_steps": 5, "skips_data": False, "time": NOON.timestamp() + 60}
    run = write_run(tmp_path / "run", steps=(10, 20), events=[restart])
    page = make_page([read_run(run)])
    assert {chart.series[0].curve.x == [10] for chart in page.result_charts} == {True}
    assert report([str(run), "--no-charts"]) == 0 and "step 10, a.txt" in capsys.readouterr().out


def test_values_that_are_no_numbers_are_left_out_and_a_damaged_set_hides_no_other(tmp_path):
    run = write_run(tmp_path / "run")
    for step, loss in ((10, math.nan), (20, 800.0)):
        figures = {"tokens": 9, "loss": loss, "loss_stderr": None, "perplexity": None}
        publish(run, "text", step, {"a.txt": figures})
    publish(run, "damaged", 10, {"b.txt": {"loss": 1.0}})
    (run / "evaluations" / "damaged" / "step-00000010.json").write_text("{")
    page = make_page([read_run(run)])
    [chart] = page.result_charts
    assert (chart.series[0].curve.x, chart.series[0].curve.mean, chart.series[0].errors) == ([20], [800.0], (None,))
    assert page.newest_results == (("text: a.txt, loss", "800.0000 (step 20)"),)
    text = render_page(page, now_s=0.0)
    assert "standard errors" not in text and "NaN" not in text
    assert "Left out: " in text and "damaged/step-00000010.json is not the result of an evaluation" in text


def test_a_run_whose_only_set_is_damaged_says_so(tmp_path):
    run = write_run(tmp_path / "run")
    publish(run, "damaged", 10, {"b.txt": {"loss": 1.0}})
    (run / "evaluations" / "damaged" / "step-00000010.json").write_text("{")
    text = render_page(make_page([read_run(run)]), now_s=0.0)
    assert "step-00000010.json is not the result" in text and "Newest results" not in text


def test_many_checkpoints_and_tasks_fit_into_the_page(tmp_path):
    """Of many checkpoints some are drawn, none is averaged; of many tasks the later charts are folded."""
    run = write_run(tmp_path / "run")
    files = read_run(run)
    rows = [{"step": step, "tokens": step, "results": {"task": {"acc": 1 / step}}} for step in range(1, 2000)]
    tasks = {f"task {number}": TASK for number in range(OPEN_RESULT_CHARTS)}
    history = {"long": rows, "wide": [{"step": 1, "tokens": 1, "results": tasks}]}
    page = make_page([type(files)(name="run", lines=files.lines, results=history)])
    curve = page.result_charts[0].series[0].curve
    assert (len(page.runs[0].results), page.runs[0].num_results) == (MAX_RESULTS, 1999 + 2 * OPEN_RESULT_CHARTS)
    assert MAX_POINTS / 2 < len(curve.x) <= MAX_POINTS and curve.x[-1] == 1999
    assert curve.mean == [1 / step for step in curve.x]
    text = render_page(page, now_s=0.0)
    assert text.count('data-chart="result-') == 1 + 2 * OPEN_RESULT_CHARTS
    assert (
        f"<summary>{1 + OPEN_RESULT_CHARTS} more charts</summary>" in text
        and "(without the first 1,023)" in text
        and len(text.encode()) < 2**20
    )


@pytest.mark.parametrize("step", [20, 10], ids=["another", "the same again"])
def test_a_served_page_notices_a_result(tmp_path, step):
    run = write_run(tmp_path / "run", steps=(10,))
    os.utime(run / "evaluations" / "files", ns=(1, 1))
    served = RenderedRun(run)
    before, text = served.version(), served.text()
    assert served.version() == before
    publish(run, "files", step, {"a.txt": {"loss": 3.21}})
    assert served.version() != before and served.text() != text and "3.2100" in served.text()
