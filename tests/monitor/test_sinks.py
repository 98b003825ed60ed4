from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest

from parallel3d.monitor.progress_display import PlainDisplay
from parallel3d.monitor.run_folder import ContinuedRunFolder, RunFolder, read_metrics
from parallel3d.monitor.sinks import RunReporter
from parallel3d.monitor.uptime import RunHistory


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(number: int, **fields) -> dict:
    return {"kind": "step", "step": number, "loss": 8.0 / number, "tokens_per_s": 1234.0, "step_s": 2.0, **fields}


def report_of(tmp_path, out: io.StringIO, *, folder: RunFolder | None = None) -> tuple[RunReporter, io.StringIO]:
    err = io.StringIO()
    folder = folder or RunFolder(tmp_path, config="{}", environment={})
    return RunReporter(folder, title="small", out=out, err=err), err


def test_a_whole_run(tmp_path):
    report, err = report_of(tmp_path, out := io.StringIO())
    report.start()
    for record in (
        {"kind": "total", "num_steps": 4},
        {"kind": "hello", "coordinates": "pp0"},
        *(step(number) for number in (1, 2, 3, 4)),
        {"kind": "evaluation", "step": 4, "loss": 2.5},
        {"event": "membership", "generation": 1, "step": 4},
        {"kind": "summary", "final_loss": 2.0, "unigram_entropy": 5.0, "state_bytes": 2**20, "tokens": 4096},
    ):
        report.publish(record)
    report.close("", exit_code=0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in lines if "event" not in line] == [1, 2, 3, 4]
    assert [line["event"] for line in lines if "event" in line] == ["evaluation", "membership", "summary"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exit_code"], summary["last_step"], summary["final_loss"]) == (0, 4, 2.0)
    assert "step 1/4  loss 8.0000  1,234 tokens/s  ETA 0:06" in out.getvalue()
    assert "loss / unigram entropy    0.400" in out.getvalue() and "1.0 MiB" in out.getvalue()
    assert "metrics.jsonl, summary.json, results.json, loss.png" in out.getvalue()
    assert err.getvalue() == ""


def test_a_summary_with_an_impossible_mfu_says_why(tmp_path):
    report, _ = report_of(tmp_path, out := io.StringIO())
    report.start()
    peak = {"peak_flops_per_s": 3e10, "peak_source": "measured"}
    report.publish({"kind": "summary", "mfu": 1.029, "seconds": None, "tokens_per_s": None, **peak})
    report.close("", exit_code=0)
    assert "102.9" not in out.getvalue() and "measured under load" in out.getvalue()
    assert "seconds" not in out.getvalue() and "tokens/s" not in out.getvalue()


def test_a_process_that_takes_over_at_the_very_end_has_the_whole_summary(tmp_path):
    report, _ = report_of(tmp_path, io.StringIO())
    report.start()
    report.publish({"event": "started", "step": 0, "time": 1000.0})
    report.publish(step(1))
    report.publish({"kind": "summary", "final_loss": 2.0, "unigram_entropy": 5.0})
    report.flush()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines[-1]["event"] == "summary"  # nothing is on its way any more
    report._folder.close()  # as at the end of its process
    after, _ = report_of(tmp_path, out := io.StringIO(), folder=ContinuedRunFolder(tmp_path))
    after.start()
    after.close("", exit_code=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["last_step"], summary["final_loss"], summary["unigram_entropy"]) == (1, 2.0, 5.0)
    assert "event" not in summary and "time" not in summary and "final loss" in out.getvalue()


def test_a_resumed_run_that_fails_has_no_figures_of_the_run_before(tmp_path):
    first = [
        {"event": "started", "step": 0, "time": 1.0},
        {"step": 1},
        {"event": "summary", "final_loss": 2.0, "time": 2.0},
    ]
    for lines in (first, [*first, {"event": "started", "step": 1, "time": 3.0}]):
        path = tmp_path / str(len(lines))
        folder = RunFolder(path, config="{}", environment={})
        for line in lines:
            folder.append_metrics(line)
        if len(lines) > len(first):
            folder.close()
            folder = ContinuedRunFolder(path)
        report, _ = report_of(path, io.StringIO(), folder=folder)
        report.start()
        report.close("a failure", exit_code=3)
        assert "final_loss" not in json.loads((path / "summary.json").read_text())


@pytest.mark.parametrize("exit_code", [0, 3])
def test_the_summary_is_there_before_the_outcome_is_known_elsewhere(tmp_path, exit_code):
    """A run that fails may restart: its summary waits for that decision."""
    report, _ = report_of(tmp_path, io.StringIO())
    report.start()
    report.publish(step(1))
    report.publish({"kind": "outcome", "exit_code": exit_code})
    report.flush()
    assert (tmp_path / "summary.json").exists() == (exit_code == 0)
    report.close("", exit_code=exit_code)
    assert json.loads((tmp_path / "summary.json").read_text())["exit_code"] == exit_code


def test_a_run_that_fails_early_still_has_its_summary(tmp_path):
    report, err = report_of(tmp_path, io.StringIO())
    report.start()
    report.close("rank 1 was killed", exit_code=3)
    assert err.getvalue() == "rank 1 was killed\n"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"exit_code": 3, "message": "rank 1 was killed", "last_step": None, "last_loss": None}
    assert not (tmp_path / "loss.png").exists()


def test_charts_can_be_turned_off(tmp_path):
    folder = RunFolder(tmp_path, config="{}", environment={})
    report = RunReporter(folder, title="small", charts=False, out=(out := io.StringIO()), err=io.StringIO())
    report.start()
    for number in (1, 2, 3):
        report.publish(step(number))
    report.close("", exit_code=0)
    assert (tmp_path / "summary.json").exists() and not (tmp_path / "loss.png").exists()
    assert "loss.png" not in out.getvalue()


def test_the_bar_on_a_terminal(tmp_path):
    report, _ = report_of(tmp_path, out := Terminal())
    report.start()
    for record in ({"kind": "total", "num_steps": 10}, step(5), {"kind": "notice", "text": "hear"}, step(6)):
        report.publish(record)
    report.publish({"kind": "summary", "final_loss": None, "unigram_entropy": 5.0})  # stopped before the first step
    report.close("", exit_code=0)
    assert "step 5/10 |" in out.getvalue() and "loss 1.6000  1,234 tokens/s  ETA 0:10" in out.getvalue()
    assert "hear\n" in out.getvalue()


def counts(live, spare, lost, *widths):
    return {"live": live, "spare": spare, "lost": lost, "places": 8, "widths": widths}


def test_the_bar_says_who_is_left_once_somebody_is_lost(tmp_path):
    report, _ = report_of(tmp_path, out := Terminal())
    report.start()
    report.publish({"kind": "total", "num_steps": 10})
    report.publish({"kind": "membership", "text": "generation 1: as before", **counts(8, 0, 0, 4, 4)})
    report.publish(step(5))
    report.publish({"kind": "membership", "text": "generation 2: lost rank 3", **counts(6, 1, 1, 4, 3)})
    report.publish(step(6))
    report.publish({"kind": "membership", "text": "generation 3: rank 9 joins", **counts(9, 0, 0, 4, 5)})
    report.publish(step(7))
    report.publish({"kind": "membership", "text": "generation 4: lost rank 2", **counts(8, 0, 1, 3, 5)})
    report.publish(step(8))
    report.close("", exit_code=0)
    fifth, sixth = out.getvalue().split("generation 2: lost rank 3\n")
    sixth, seventh = sixth.split("generation 3: rank 9 joins\n")
    seventh, eighth = seventh.split("generation 4: lost rank 2\n")
    assert "live 9 spare 0 lost 0 width 4/5" in seventh and "live 8 spare 0 lost 1 width 3/5" in eighth
    assert "generation 1: as before\n" in fifth and "live" not in fifth
    assert "loss 1.3333  1,234 tokens/s  live 6 spare 1 lost 1 width 4/3  ETA 0:08" in sixth
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4  # the account of a change is a record of its own


def test_the_bar_shows_sizes_that_are_not_full_yet(tmp_path):
    report, _ = report_of(tmp_path, out := io.StringIO())
    report.start()
    report.publish({"kind": "total", "num_steps": 2, "sequence_length": 1024, "num_sequences": 64})
    report.publish(step(1) | {"sequence_length": 128, "num_sequences": 64})
    report.publish(step(2) | {"sequence_length": 1024, "num_sequences": 64})
    report.close("", exit_code=0)
    first, second = (line for line in out.getvalue().splitlines() if line.startswith("step"))
    assert "seq 128/1,024" in first and "batch" not in first and "seq" not in second


def test_a_continued_report_knows_the_earlier_records(tmp_path):
    first, _ = report_of(tmp_path, io.StringIO())
    first.start()
    assert first.last_step == 0
    first.publish(step(1))
    first.publish(step(2))
    first.publish({"event": "membership", "step": 3})
    first.close("", exit_code=4)
    second = RunReporter(ContinuedRunFolder(tmp_path), title="small", out=io.StringIO(), err=io.StringIO())
    assert second.last_step == 2
    second.start()
    second.publish(step(3))
    second.close("", exit_code=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exit_code"], summary["last_step"]) == (0, 3)


def test_a_report_whose_run_goes_on_elsewhere_leaves_no_results(tmp_path, monkeypatch):
    monkeypatch.setattr("parallel3d.monitor.run_folder.LOCK_WAIT_S", 0.1)
    frozen, _ = report_of(tmp_path, out := io.StringIO())
    frozen.start()
    frozen.publish(step(1))
    frozen.pause()
    second, _ = report_of(tmp_path, io.StringIO(), folder=ContinuedRunFolder(tmp_path))
    assert second.last_step == 1
    second.start()
    second.publish(step(2))
    second.close("", exit_code=0)
    frozen.publish(step(2))
    frozen.close("rank 0: the coordinator lost its quorum", exit_code=4)
    assert "another process goes on with the run" in out.getvalue()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exit_code"], summary["last_step"]) == (0, 2)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_file_system_that_does_not_answer_does_not_keep_the_run_from_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("parallel3d.monitor.sinks.FLUSH_S", 0.1)
    answers, err = threading.Event(), io.StringIO()
    folder = RunFolder(tmp_path, config="{}", environment={})
    report = RunReporter(folder, title="small", charts=False, out=io.StringIO(), err=err)
    append = report._folder.append_metrics
    monkeypatch.setattr(report._folder, "append_metrics", lambda line: answers.wait(60) and append(line))
    report.start()
    report.publish(step(1))
    report.close("stopped", exit_code=130)
    assert "does not answer: the last lines and the summary are missing" in err.getvalue()
    assert err.getvalue().endswith("stopped\n") and not (tmp_path / "summary.json").exists()
    answers.set()


def bytes_read():
    """By this process so far, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_a_process_that_takes_over_reads_the_history_when_it_is_asked_for(tmp_path, monkeypatch, disk_is_full):
    first, _ = report_of(tmp_path, io.StringIO())
    first.close("", exit_code=4)
    lines = [{"event": "started", "step": 0, "time": 0.0, "path": None}]
    lines += [{**step(number), "step_s": 2.0, "text": "x" * 500} for number in range(1, 20_001)]
    lines += [{"event": "evaluation", "step": 20_000, "seconds": 3.0, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = bytes_read()
    second, _ = report_of(tmp_path, out := io.StringIO(), folder=ContinuedRunFolder(tmp_path))
    second.start()
    assert (second.last_step, second.last_evaluation) == (20_000, 20_000)
    assert bytes_read() - before < 10**6 < (tmp_path / "metrics.jsonl").stat().st_size / 10
    if disk_is_full:
        monkeypatch.setattr(second._folder, "append_metrics", refuse)
    second.publish({**step(20_001), "step_s": 2.0})
    second.publish({**step(20_002), "step_s": 2.0})
    second.pause()
    assert second.run_history.last_step == 20_002
    second.publish({**step(20_003), "step_s": 2.0})
    second.close("", exit_code=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["last_step"], summary["productive_s"]) == (20_003, 40_009.0), out.getvalue()


def refuse(line):
    raise OSError(28, "No space left on device")


def test_a_run_that_begins_again_leaves_one_curve(tmp_path):
    report, err = report_of(tmp_path, out := io.StringIO())
    report.start()
    report.publish({"event": "started", "step": 0})
    for record in (
        step(1),
        step(2),
        {"kind": "evaluation", "step": 2, "loss": 9.0},
        {"kind": "notice", "text": "hear"},
    ):
        report.publish(record)
    report.pause()
    assert report.run_history.last_step == 2
    report.publish({"event": "ended", "exit_code": 3, "attempt_start_step": 0, "last_step": 2})
    report.publish({"kind": "restart", "text": "again", "step": 1, "lost_steps": 1, "skips_data": False})
    report.start()
    report.publish(step(2, loss=7.0))
    report.publish(step(3, loss=6.0))
    report.close("", exit_code=0)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    steps = [line for line in lines if "event" not in line]
    assert [(line["step"], line["loss"]) for line in steps] == [(1, 8.0), (2, 7.0), (3, 6.0)]
    (restarted_at,) = [line["time"] for line in lines if line.get("event") == "restart"]
    assert ["time" in line for line in steps] == [False, True, False] and steps[1]["time"] >= restarted_at
    assert [line["event"] for line in lines if "event" in line] == ["started", "notice", "ended", "restart"]
    assert [line["loss"] for line in read_metrics(tmp_path / "lost-steps.jsonl")] == [4.0, 9.0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["restarts"], summary["lost_steps"], summary["productive_s"]) == (1, 1, 6.0)
    assert out.getvalue().count("small: run folder") == 1 and "again\n" in out.getvalue()
    assert "goodput (productive / wall)" in out.getvalue()


def test_the_summary_of_a_resumed_run_has_the_figures_of_its_lines(tmp_path):
    """The seconds of both legs: also those of step 2, which the resume leaves behind."""
    for start in (0, 1):
        folder = RunFolder(tmp_path, config="{}", environment={}, history_until_step=start)
        report, _ = report_of(tmp_path, io.StringIO(), folder=folder)
        report.start()
        for record in ({"event": "started", "step": start}, step(start + 1), step(start + 2)):
            report.publish(record)
        report.close("", exit_code=0)
    lines, summary = read_metrics(tmp_path / "metrics.jsonl"), json.loads((tmp_path / "summary.json").read_text())
    figures = RunHistory(lines).figures()
    assert {name: summary[name] for name in figures} == figures
    assert (figures["productive_s"], figures["wall_s"]) == (6.0, pytest.approx(8.0, abs=1e-3))


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, monkeypatch):
    report, err = report_of(tmp_path, io.StringIO())
    monkeypatch.setattr(report._folder, "append_metrics", refuse)
    report.start()
    for number in (1, 2):
        report.publish(step(number))
    report.close("", exit_code=0)
    assert err.getvalue() == f"can't write into {tmp_path} any more (No space left on device)\n"


def test_plain_lines_come_every_ten_seconds_or_five_percent():
    now = 0.0
    out = io.StringIO()
    progress = PlainDisplay(out, clock=lambda: now)
    for number in range(1, 101):
        progress.show(number, 100, "", 0.0)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == [
        "1/100",
        *(f"{number}/100" for number in range(6, 100, 5)),
        "100/100",
    ]
    out.truncate(0)
    for number in range(1, 31):
        now += 1.0
        progress.show(100 + number, 10_000, "", 0.0)
    assert out.getvalue().count("\n") == 3
