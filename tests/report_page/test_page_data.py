"""What the page of a run shows is what its files say."""

import html
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.commands.report import main
from parallel3d.monitor.saved_notice import SavedNotice
from parallel3d.report_page.html_page import render_page
from parallel3d.report_page.page_data import RunFiles, make_page
from parallel3d.report_page.page_file import name_runs, read_run
from parallel3d.report_page.scales import MAX_POINTS, Curve, linear_scale, log_scale
from parallel3d.report_page.svg_chart import draw_chart, scales_of

MARKUP = "<script>alert(1)</script>"


def run_files(num_steps=40, name="run", losses=None, **more):
    losses = losses or [6.0 - 0.1 * step for step in range(num_steps)]
    steps = [
        {"step": step, "loss": loss, "tokens": 100 * step, "grad_norm": 1.0 + step, "step_s": 0.5}
        for step, loss in enumerate(losses, start=1)
    ]
    start = [{"event": "started", "step": 0, "time": 1000.0}]
    return RunFiles(name=name, lines=[*start, *steps, *more.pop("events", [])], **more)


CHANGE = {
    "event": "membership",
    "step": 7,
    "who": [{"rank": 3, "coordinates": "pp1 dp1 tp0"}],
    "joined": [],
    "why": f"lost rank 3: {MARKUP}",
    "detect_s": None,
    "agree_s": 0.25,
    "repair_s": 0.5,
    "regroup_s": 0.125,
    "widths_before": [2, 2],
    "widths": [2, 1],
}


def test_the_figures_are_those_of_the_files():
    events = [{"event": "evaluation", "step": 20, "loss": 4.5, "seconds": 1.0}, CHANGE]
    ended = {"event": "ended", "exit_code": 0, "attempt_start_step": 0, "last_step": 40, "time": 1100.0}
    summary = {"exit_code": 0, "final_loss": 2.25, "planned_bubble": 0.2, "unigram_entropy": 6.5}
    page = make_page([run_files(events=[*events, ended], summary=summary, read_at=9e9)], dollars_per_hour=36.0)
    figures = page.runs[0].figures
    assert (figures["steps"], figures["tokens"], figures["final loss"]) == ("40", "4,000", "2.2500")
    assert figures["best evaluation"] == "4.5000 (step 20)" and figures["bubble, planned"] == "20.0%"
    assert figures["workers lost"] == "1" and figures["seconds that changes have cost"] == "0.88"
    assert figures["wall-clock time"] == "100.0 s" and figures["goodput (productive share of the time)"] == "21.0%"
    assert figures["dollars so far"] == "1.00" and figures["dollars for a million tokens"] == "250"
    assert (figures["dollars of evaluations"], figures["dollars without evaluations"]) == ("0.01", "0.99")
    assert figures["dollars for 4 million tokens (HLAT's CPT)"] == "1,000"
    assert figures["dollars for a trillion tokens"] == "2.5e+08"
    own = run_files(events=[*events, ended], summary=summary, config={"monitor": {"dollars_per_hour": 72.0}})
    assert make_page([own]).runs[0].figures["dollars so far"] == "2.00"
    assert make_page([own], dollars_per_hour=36.0).runs[0].figures == figures
    assert page.runs[0].status == "finished, 40 steps" and page.runs[0].changes[0].widths == "2/2 to 2/1"
    charts = {chart.name: chart for chart in page.charts}
    assert [*charts] == ["loss", "loss_ratio", "grad_norm", "step_s", "widths-0"]
    training, evaluation = charts["loss"].series
    assert training.curve.mean == [6.0 - 0.1 * step for step in range(40)] and evaluation.curve.mean == [4.5]
    assert [series.curve.mean for series in charts["widths-0"].series] == [[2, 2, 2], [2, 1, 1]]
    assert scales_of(charts["widths-0"])[1].ticks == (0, 1, 2)


def test_messages_hold_restarts_and_preemptions():
    told = [{"event": kind, "text": f"a {kind}", "time": 7.0} for kind in ("notice", "drain", "balance", "preemption")]
    restart = {"event": "restart", "step": 9, "lost_steps": 3, "skips_data": False, "text": "a restart", "time": 8.0}
    page = make_page([run_files(events=[*told, CHANGE, restart])])
    assert page.runs[0].notices == (*((7.0, line["text"]) for line in told), (8.0, "a restart"))
    text = render_page(page, now_s=0.0)
    assert "a restart" in text and "a preemption" in text


def test_checkpoints():
    def saved(step, at):
        text = str(SavedNotice(step=step, path="runs/a, b: c/step", megabytes=1234.56))
        return {"event": "notice", "text": f"{text}; could not remove older ones (no)", "time": at}

    restart = {"event": "restart", "step": 10, "lost_steps": 12, "skips_data": False, "time": 3.5}
    events = [
        saved(10, 1.0),
        saved(20, 2.0),
        restart,
        saved(30, 4.0),
        {"event": "notice", "text": "saved it", "time": 5},
    ]
    uploads = [
        {"event": "uploading", "step": 30, "time": 5.0},
        {"event": "uploaded", "step": 10, "time": 6.0},
        {"event": "uploaded", "step": 20, "time": 7.0},
    ]
    run = make_page([run_files(events=events, uploads=uploads)]).runs[0]
    rows = [(row.step, row.megabytes, row.saved_at, row.uploaded_at) for row in run.checkpoints]
    assert rows == [(10, 1234.6, 1.0, 6.0), (30, 1234.6, 4.0, None)]
    assert run.figures["checkpoints saved"] == "2 (newest: step 30)"
    assert run.figures["checkpoints uploaded"] == "1 (newest: step 10)"
    table = render_page(make_page([run_files(events=events, uploads=uploads)]), now_s=0.0).split("<caption>Checkpoints")
    assert "<td role=cell>1,234.6</td><td role=cell>01-01 00:00:01</td><td role=cell>01-01 00:00:06" in table[1]
    aside = [*uploads, {"event": "set_aside", "step": 10, "time": 8.0}]
    assert "checkpoints uploaded" not in make_page([run_files(events=events, uploads=aside)]).runs[0].figures


def test_a_spike_is_marked_at_its_highest_value():
    losses = [4.0] * 30 + [5.0, 6.0, 4.9] + [4.0] * 5 + [math.nan, 7.0]
    files = run_files(losses=losses)
    norms = {line["step"]: 1.0 for line in files.lines if "step_s" in line} | {25: 1.2, 26: 3.0, 27: 1.5, 40: math.inf}
    lines = [line | {"grad_norm": norms[line["step"]]} if "step_s" in line else line for line in files.lines]
    charts = {chart.name: chart for chart in make_page([RunFiles(name="run", lines=lines)]).charts}
    for name, peaks in (("loss", [(32, 6.0), (40, 7.0)]), ("grad_norm", [(26, 3.0)])):
        spikes = charts[name].series[-1]
        assert spikes.kind == "spikes" and [*zip(spikes.curve.x, spikes.curve.mean)] == peaks
        assert draw_chart(charts[name]).count('<circle class="spike"') == len(peaks)


def test_the_planned_bubble_is_that_of_each_step():
    """It changes with the membership, and is there while the run goes on; the summary has that of the last step."""
    planned = [0.2] * 20 + [0.4] * 20
    lines = [
        line | {"bubble": 0.5, "planned_bubble": planned[line["step"] - 1]} if "loss" in line else line
        for line in run_files().lines
    ]
    for summary in ({}, {"exit_code": 0, "planned_bubble": 0.4}):
        page = make_page([RunFiles(name="run", lines=lines, summary=summary)])
        [chart] = [chart for chart in page.charts if chart.name == "bubble"]
        assert [(each.label, each.kind) for each in chart.series] == [("measured", "line"), ("planned", "planned")]
        assert chart.series[1].curve.mean == planned and chart.references == ()
        assert draw_chart(chart).count('class="c0 planned"') == 1
        assert '<span class="swatch c0 dashed"></span>planned' in render_page(page, now_s=0.0)


def test_each_run_has_its_own_reference_lines():
    """One for all where all agree; a run that has no value yet has no line."""

    def references(*values):
        runs = [
            run_files(
                name=name,
                config={"optimizer": {"max_grad_norm": clip}},
                summary={} if entropy is None else {"exit_code": 0, "unigram_entropy": entropy},
            )
            for name, (clip, entropy) in zip("abc", values)
        ]
        charts = {chart.name: chart for chart in make_page(runs).charts}
        lines = {name: charts[name].references for name in ("loss", "grad_norm")}
        drawn = [draw_chart(charts[name]) for name in lines]
        return [[(each.label, each.value, each.run) for each in lines[name]] for name in lines], drawn

    assert references((1, 5.0))[0] == [[("unigram entropy", 5.0, None)], [("clipped above", 1.0, None)]]
    assert references((1, 5.0), (1.0, 5.0))[0] == references((1, 5.0))[0]
    found, (loss, norm) = references((1, 5.0), (5, 5.05), (5, None))
    assert found[0] == [("a, unigram entropy", 5.0, 0), ("b, unigram entropy", 5.05, 1)]
    assert found[1] == [("a, clipped above", 1.0, 0), ("b, clipped above", 5.0, 1), ("c, clipped above", 5.0, 2)]
    assert 'class="reference c1"' in norm and '>b, clipped above</text>' in norm and "c, clipped above: 5" in norm
    heights = [float(part.split('y="')[1].split('"')[0]) for part in loss.split('<text class="note')[1:]]
    assert len(heights) == 2 and heights[1] - heights[0] >= 12  # b's label, then a's below it


def test_many_spikes_leave_the_highest():
    norms = [1.0] * 20 + [9.0 + number if number % 25 == 24 else 1.0 for number in range(25 * 400)]
    steps = [{"step": step, "loss": 1.0, "grad_norm": norm} for step, norm in enumerate(norms, start=1)]
    [chart] = [chart for chart in make_page([RunFiles(name="run", lines=steps)]).charts if chart.name == "grad_norm"]
    rings = chart.series[-1].curve
    assert len(rings.x) == MAX_POINTS and min(rings.mean) == norms[int(rings.x[0]) - 1] == sorted(norms)[-MAX_POINTS]


def test_a_run_that_goes_on_lasts_until_now():
    page = make_page([run_files(read_at=1200.0, config={"run": {"num_steps": 90}})])
    assert page.runs[0].figures["wall-clock time"] == "200.0 s"
    assert page.runs[0].status == "not finished, 40 of 90 steps" and "dollars so far" not in page.runs[0].figures


def test_dollars_are_those_of_all_legs():
    """At a dollar a second: a leg that ended with its evaluation, a time that is not paid for, and a resume."""
    evaluation = {"event": "evaluation", "step": 40, "loss": 4.5, "seconds": 100.0, "time": 1100.0}
    started = {"event": "started", "step": 40, "time": 2000.0}
    step = {"step": 41, "loss": 2.0, "tokens": 4100, "step_s": 0.5}
    ended = {"event": "ended", "exit_code": 0, "attempt_start_step": 40, "last_step": 41, "time": 2012.0}
    lines = [*run_files().lines, evaluation, started, step]
    done = RunFiles(name="run", lines=[*lines, ended], summary={"exit_code": 0}, read_at=9e9)
    figures = make_page([done], dollars_per_hour=3600.0).runs[0].figures
    shown = {name: value for name, value in figures.items() if name.startswith(("dollars", "wall", "legs"))}
    assert shown == {
        "legs (the first one and resumes)": "2",
        "wall-clock time": "112.0 s",
        "dollars so far": "112.00",
        "dollars of evaluations": "100.00",
        "dollars without evaluations": "12.00",
        "dollars for a million tokens": "27,317",
        "dollars for 4 million tokens (HLAT's CPT)": "109,268",
        "dollars for a trillion tokens": "2.73e+10",
    }
    for read_at, seconds in ((None, "100.5"), (2030.0, "130.0")):  # the second leg was killed; it goes on
        page = make_page([RunFiles(name="run", lines=lines, read_at=read_at)], dollars_per_hour=3600.0)
        assert page.runs[0].figures["wall-clock time"] == f"{seconds} s"
        assert page.runs[0].figures["dollars so far"] == f"{seconds}0"


def test_tokens_cost_what_this_run_has_paid_for_them():
    """It began with another run's checkpoint of step 40; the tokens before that were the other's."""
    started = {"event": "started", "step": 40, "time": 2000.0}
    step = {"step": 41, "loss": 2.0, "tokens": 4100, "step_s": 0.5, "sequence_length": 20, "num_sequences": 5}
    lines = [started, step, {**step, "step": 42, "tokens": 4200}, {"event": "notice", "text": "saved", "time": 2012.0}]
    figures = make_page([RunFiles(name="run", lines=lines)], dollars_per_hour=3600.0).runs[0].figures
    assert (figures["tokens"], figures["dollars for a million tokens"]) == ("4,200", "60,000")


def test_strings_of_users_are_only_text():
    files = run_files(name=MARKUP, events=[CHANGE], environment={"command_line": ["train", MARKUP]})
    text = render_page(make_page([files, run_files(name="other")]), now_s=0.0)
    assert MARKUP not in text and text.count("<script") == text.count("</script>") == 2
    data = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["charts"][0]["series"][0]["label"] == f"{MARKUP}, training"


def test_the_command_that_repeats_the_run():
    """Its relative paths start at the working directory, which older folders lack; a resume is not the whole run."""
    first = {"command_line": ["train", "a b"], "working_directory": "/old place", "host": "x"}
    newest = {"command_line": ["train", "run.resume=auto"], "working_directory": "/new"}
    lines, resume = run_files().lines, {"event": "started", "step": 40, "time": 2000.0}
    whole, resumed = "cd '/old place'\ntrain 'a b'", "cd /new\ntrain run.resume=auto"

    def commands(environment, lines=lines, **more):
        return make_page([RunFiles(name="a", lines=lines, environment=environment, **more)]).runs[0].commands

    assert commands({}) == () and commands(first) == (("", whole),)
    assert commands({"command_line": ["train"], "working_directory": None}) == (("", "train"),)
    both = commands(newest, [*lines, resume], first_environment=first)
    assert both == (("The first leg:", whole), (both[1][0], resumed))
    assert both[1][0] == (
        "The newest of 2 legs, which went on after step 40: this command alone does not make the whole run."
    )
    [(unknown, command)] = commands(newest, [*lines, resume])
    assert command == resumed and unknown == f"{both[1][0]} The command of the first leg is not known."
    [(elsewhere, _)] = commands(newest, [resume, {"step": 41, "loss": 2.0}])
    assert elsewhere.startswith("The only leg in this folder, which went on after step 40: this command alone")
    files = RunFiles(name="a", lines=[*lines, resume], environment=newest, first_environment=first)
    text = render_page(make_page([files]), now_s=0.0)
    assert f"<pre>{html.escape(whole)}</pre>" in text and f"<pre>{resumed}</pre>" in text and both[1][0] in text


def test_the_first_legs_command_is_found_where_the_resume_has_moved_it(tmp_path):
    """Among the files of another run, of a leg that ended before it started, and of a second leg."""
    starts = [{"event": "started", "step": step, "time": 9.0 + step} for step in (0, 1, 2)]
    other = {"event": "started", "step": 0, "time": 1.0}
    folders = {"previous-2": [other], "previous-9": starts[:1], "previous-10": starts[:1], "previous-11": starts[:2]}
    for name, found in {**folders, "": starts, "previous-x": starts[:1]}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        lines = [line for start in found for line in (start, {"step": start["step"] + 1, "loss": 2.0})]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / name / "environment.json").write_text(json.dumps({"command_line": [f"train of {name}"]}))
    assert read_run(tmp_path).first_environment == {"command_line": ["train of previous-9"]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(starts[0]) + '\n{"step": 1, "loss": 2.0}\n')
    assert read_run(tmp_path).first_environment == {}


def test_long_runs_fit_into_a_megabyte():
    losses = [5.0 + math.sin(step) for step in range(50_000)]
    losses[777] = 90.0
    losses[778] = math.nan
    page = make_page([run_files(name=str(number), losses=losses) for number in range(6)])
    curve = page.charts[0].series[0].curve
    assert len(curve.x) <= MAX_POINTS and max(curve.high) == 90.0 and curve.x[-1] == 50_000
    assert len(render_page(page, now_s=0.0).encode()) < 2**20


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=900))
def test_windows_keep_the_extremes_and_the_mean(values):
    curve = Curve.of([*enumerate(values)])
    assert min(curve.low) == min(values) and max(curve.high) == max(values)
    assert len(curve.x) <= MAX_POINTS and curve.x[-1] == len(values) - 1
    sizes = [min(curve.steps_per_point, len(values) - start) for start in range(0, len(values), curve.steps_per_point)]
    total = math.fsum(mean * size for mean, size in zip(curve.mean, sizes))
    assert total == pytest.approx(math.fsum(values), rel=1e-9, abs=1e-3)


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12))
def test_a_scale_holds_its_values(low, size):
    scale = linear_scale(low, low + size)
    room = 1e-9 * (abs(low) + size)
    assert scale.low <= low + room and low + size <= scale.high + room and 2 <= len(scale.ticks) <= 13
    assert 0.0 <= scale.share(low) <= scale.share(low + size) <= 1.0


def test_a_logarithmic_scale_ends_with_powers_of_ten():
    scale = log_scale(0.02, 3000.0)
    assert (scale.low, scale.high) == (0.01, 10_000.0) and scale.share(10.0) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "folders, names",
    [
        (["a"], ["a"]),
        (["a/run", "b/run", "b/other"], ["a/run", "b/run", "other"]),
        (["a/x/run", "b/x/run", "b/y/run"], ["a/x/run", "b/x/run", "y/run"]),
        (["run", "run/run", "run/run/run"], ["top/run", "top/run/run", "run/run/run"]),
    ],
)
def test_runs_are_shown_under_different_names(folders, names, tmp_path):
    top = tmp_path / "top"
    assert name_runs([top / folder for folder in folders]) == names


def test_runs_whose_folders_have_the_same_name_are_told_apart(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    first, second = (str(tmp_path / name / "run") for name in ("a", "b"))
    assert main([first, second, "--html"]) == 0
    page = (tmp_path / "a" / "run" / "report.html").read_text()
    assert "<title>a/run and b/run</title>" in page and "columnheader>b/run</th>" in page
    (tmp_path / "link").symlink_to(first)
    for again in (first, f"{second}/../../a/run", str(tmp_path / "link")):
        assert main([first, second, again, "--html"]) == 2
        assert f"{again}: the same folder as {first}" in capsys.readouterr().err


def test_mistakes_are_named(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"event": "started", "step": 0, "time": 1}\n')
    for arguments, said in (
        (["--html"], "holds no step yet"),
        (["--out", "x.html"], "--out has no effect without --html"),
        (["--html", "--json"], "--json has no effect with --html"),
        (["--html", "--dollars-per-hour", "0"], "must be more than 0"),
        (["--html", "--dollars-per-hour", "inf"], "must be more than 0"),
        ([str(tmp_path / "nothing"), "--html"], "holds no step yet"),
    ):
        assert main([str(tmp_path), *arguments]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert main([str(tmp_path), str(tmp_path / "nothing"), "--html"]) == 2
    assert "nothing is not the folder of a run" in capsys.readouterr().err
    assert main([str(tmp_path), "--html", "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert "give another place with --out" in capsys.readouterr().err
    assert main([str(tmp_path), "--html"]) == 0 and (tmp_path / "report.html").exists()
