"""The page that a run writes: at its end, while it goes on, and never at the run's cost."""

import io
import json
import subprocess
import time

import pytest

from parallel3d.monitor.page_writer import PageWriter
from parallel3d.monitor.run_folder import PAGE, RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.report_page.page_file import write_page_of


def close_report(folder, write, *, num_steps=3):
    report = RunReporter(
        RunFolder(folder, config="{}", environment={}),
        title="small",
        charts=False,
        write_page=write,
        out=(out := io.StringIO()),
        err=(err := io.StringIO()),
    )
    report.start()
    report.publish({"event": "started", "step": 0})
    for step in range(1, num_steps + 1):
        report.publish({"kind": "step", "step": step, "loss": 5.0 - step, "tokens": step})
    report.close("", exit_code=0)
    return out.getvalue(), err.getvalue()


def test_the_end_of_a_run_has_its_page(tmp_path):
    out, err = close_report(tmp_path, write_page_of)
    page = (tmp_path / PAGE).read_text()
    assert f", {PAGE}," in out and not err and "finished, 3 steps" in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["charts"][0]["series"][0]["curve"]["mean"] == [4.0, 3.0, 2.0]


def test_a_run_without_a_step_has_none(tmp_path):
    assert close_report(tmp_path, write_page_of, num_steps=0)[1] == "" and not (tmp_path / PAGE).exists()


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), OSError("full")])
def test_a_page_that_fails_fails_no_run(tmp_path, error):
    def write(folder):
        raise error

    out, err = close_report(tmp_path, write)
    assert err == f"can't write {PAGE} ({type(error).__name__}: {error})\n" and "written to" in out
    assert json.loads((tmp_path / "summary.json").read_text())["exit_code"] == 0


class FakeChild:
    """A child process that runs until `returncode` is set, or it is killed."""

    pid = 7

    def __init__(self, command):
        self.command, self.returncode = command, None

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            raise subprocess.TimeoutExpired("report", timeout)

    def kill(self):
        self.returncode = -9


def test_children_come_one_at_a_time_and_end_before_the_last_page(tmp_path, monkeypatch):
    children, now, written = [], [0.0], []

    def popen(command, **more):
        children.append(FakeChild(command))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    page = PageWriter(
        tmp_path, lambda folder: written.append(children[-1].returncode), every_s=10, clock=lambda: now[0]
    )
    counts = []
    for at, ends in ((9, False), (10, False), (25, False), (26, True), (30, False), (36, False)):
        now[0] = float(at)
        if ends:
            children[-1].returncode = 0
        page.on_step()
        counts.append(len(children))
    assert counts == [0, 1, 1, 2, 2, 2]
    assert children[0].command[:3] == ["nice", "-n", "19"] and children[0].command[-3:] == [
        "report",
        str(tmp_path),
        "--html",
    ]
    (tmp_path / f".{PAGE}.7").touch()
    assert page.finish() == "" and written == [-9] and not (tmp_path / f".{PAGE}.7").exists()


def test_after_a_checkpoint_the_next_page_comes_sooner(tmp_path, monkeypatch):
    """A minute after the last one began, and once; pages that come more often anyway are not held back."""
    children = []

    def popen(command, **more):
        children.append(FakeChild(command))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)

    def begun_at(every_s, saved_at):
        now, found = [0.0], []
        page = PageWriter(tmp_path, print, every_s=every_s, clock=lambda: now[0])
        for second in range(400):
            now[0] = float(second)
            if second in saved_at:
                page.on_checkpoint()
            before = len(children)
            page.on_step()
            if len(children) > before:
                found.append(second)
                children[-1].returncode = 0
        return found

    assert begun_at(300.0, ()) == [300]
    assert begun_at(300.0, (10, 11, 150)) == [60, 150]
    assert begun_at(300.0, (100,)) == [100]
    assert begun_at(40.0, (90,)) == [*range(40, 400, 40)]
    assert begun_at(None, (10,)) == []


@pytest.mark.parametrize(
    ("text", "has_page"), [("saved step 1: run/step-1, 2.0 MB", True), ("a spare has come", False)]
)
def test_a_run_asks_for_a_page_when_it_has_saved(tmp_path, monkeypatch, text, has_page):
    """Its child, a real process, writes it: at the end of this run nothing does."""
    monkeypatch.setattr("parallel3d.monitor.page_writer.AFTER_CHECKPOINT_S", 0.0)
    folder, out = RunFolder(tmp_path, config="{}", environment={}), io.StringIO()
    report = RunReporter(
        folder, title="small", charts=False, write_page=lambda path: None, page_every_s=1000.0, out=out, err=out
    )
    report.start()
    records = [{"kind": "step", "step": step, "loss": 5.0 - step, "tokens": step} for step in (1, 2)]
    for record in (records[0], {"kind": "notice", "text": text}, records[1]):
        report.publish(record)
    report.flush()
    deadline = time.monotonic() + 60
    while has_page and not (tmp_path / PAGE).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    report.close("", exit_code=0)
    assert (tmp_path / PAGE).exists() == has_page == (report._page._child is not None)
