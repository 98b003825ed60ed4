from __future__ import annotations

import json
import math
import threading

import pytest

from parallel3d.errors import UserError
from parallel3d.monitor.paid_time import PaidTime
from parallel3d.monitor.run_folder import (
    TAIL_BYTES,
    ContinuedRunFolder,
    RunFolder,
    is_being_written,
    iterate_metrics_backwards,
    read_metrics,
)


def open_folder(path) -> RunFolder:
    return RunFolder(path, config='{"a": 1}', environment={"python": "3.11"})


def test_a_new_folder(tmp_path):
    folder = open_folder(tmp_path / "runs" / "one")
    assert folder.moved_to is None
    assert (folder.path / "config.json").read_text() == '{"a": 1}\n'
    assert json.loads((folder.path / "environment.json").read_text()) == {"python": "3.11"}
    assert (folder.path / "logs").is_dir()
    folder.close()


def test_what_only_a_worker_knows_joins_the_environment(tmp_path):
    folder = open_folder(tmp_path)
    folder.add_environment({"device": "NVIDIA H200", "cuda": "13.0"})
    folder.close()
    expected = {"python": "3.11", "device": "NVIDIA H200", "cuda": "13.0"}
    assert json.loads((tmp_path / "environment.json").read_text()) == expected


def test_the_end_of_a_run_is_in_one_file_for_programs(tmp_path):
    folder = open_folder(tmp_path)
    folder.add_environment({"device": "NVIDIA H200"})
    folder.write_summary({"tokens_per_s": 2.5, "peak_tokens_per_s": 3.0, "last_loss": math.nan})
    folder.close()
    found = json.loads((tmp_path / "results.json").read_text())
    assert found == {
        "summary": {"tokens_per_s": 2.5, "peak_tokens_per_s": 3.0, "last_loss": "nan"},
        "configuration": {"a": 1},
        "environment": {"python": "3.11", "device": "NVIDIA H200"},
    }
    assert found["summary"] == json.loads((tmp_path / "summary.json").read_text())
    open_folder(tmp_path).close()
    assert not (tmp_path / "results.json").exists() and (tmp_path / "previous-1" / "results.json").exists()


def test_an_earlier_runs_files_are_moved_aside_and_nothing_else(tmp_path):
    for number in range(3):
        folder = open_folder(tmp_path)
        folder.append_metrics({"step": number, "loss": 1.0})
        (tmp_path / "logs" / "rank-0.log").write_text(f"run {number}")
        (tmp_path / "notes.txt").write_text("mine")
        folder.close()
    assert folder.moved_to == tmp_path / "previous-2"
    for number, folder in enumerate((tmp_path / "previous-1", tmp_path / "previous-2", tmp_path)):
        assert read_metrics(folder / "metrics.jsonl") == [{"step": number, "loss": 1.0}]
        assert (folder / "logs" / "rank-0.log").read_text() == f"run {number}"
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("last_step, seconds", [(3, None), (2, 16.0), (1, 26.0)])
def test_a_resume_keeps_the_lines_up_to_its_step_and_the_seconds_of_the_others(tmp_path, last_step, seconds):
    """Twice, since lines of several legs may be left behind; the time between legs is not in it."""
    lines = [
        {"event": "started", "step": 0, "time": 100.0},
        {"step": 1, "step_s": 10.0},
        {"event": "ended", "time": 120.0},
        {"event": "started", "step": 1, "time": 900.0},
        {"step": 2, "step_s": 10.0},
        {"step": 3, "step_s": 10.0},
        {"event": "notice", "text": "saved", "time": 926.0},
    ]
    folder = open_folder(tmp_path)
    for line in lines:
        folder.append_metrics(line)
    folder.close()
    for _ in range(2):
        RunFolder(tmp_path, config="{}", environment={}, history_until_step=last_step).close()
        *kept, last = read_metrics(tmp_path / "metrics.jsonl")
        left_behind = {"event": "left_behind", "step": last_step, "seconds": seconds}
        assert last == (left_behind if seconds else lines[-1])
        assert kept == (lines[: lines.index({"step": last_step + 1, "step_s": 10.0})] if seconds else lines[:-1])
        paid_time = PaidTime()
        for line in [*kept, last]:
            paid_time.log(line)
        assert paid_time.seconds() == 20.0 + 26.0


def test_two_runs_do_not_share_a_folder(tmp_path):
    folder = open_folder(tmp_path)
    with pytest.raises(UserError, match="another run is writing"):
        open_folder(tmp_path)
    assert not (tmp_path / "previous-1").exists()
    folder.close()
    open_folder(tmp_path).close()


def test_lines_are_on_disk_at_once_and_strict_json(tmp_path):
    folder = open_folder(tmp_path)
    folder.append_metrics({"step": 1, "loss": math.nan, "norms": [math.inf, 1.0]})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(word: str):
        raise AssertionError(word)

    read = json.loads(line, parse_constant=refuse)
    assert read == {"step": 1, "loss": "nan", "norms": ["inf", 1.0]} and math.isnan(float(read["loss"]))
    folder.close()


def test_a_line_that_a_crash_has_cut_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_a_folder_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write the run folder .*set run.directory"):
        open_folder(tmp_path / "file" / "run")


def test_another_process_goes_on_with_a_folder(tmp_path):
    first = open_folder(tmp_path)
    first.append_metrics({"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # the crash came in the middle
    threading.Timer(0.2, first.close).start()  # its lock ends a little after that
    second = ContinuedRunFolder(tmp_path)
    second.append_metrics({"step": 2})
    second.write_summary({"exit_code": 0})
    second.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert second.moved_to is None and (tmp_path / "config.json").read_text() == '{"a": 1}\n'
    open_folder(tmp_path).close()  # the lock is free again


def test_a_folder_that_can_not_be_gone_on_with_says_so_at_each_attempt(tmp_path):
    folder = ContinuedRunFolder(tmp_path / "no")
    for write in (folder.append_metrics, folder.write_summary):
        with pytest.raises(FileNotFoundError):
            write({"step": 1})
    assert not folder.is_taken
    folder.close()


def test_a_folder_is_taken_from_a_process_that_is_frozen(tmp_path, monkeypatch):
    """When it wakes up, it changes nothing that the process that goes on with the run has written, or will write."""
    monkeypatch.setattr("parallel3d.monitor.run_folder.LOCK_WAIT_S", 0.1)
    frozen = open_folder(tmp_path)
    frozen.append_metrics({"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # it was frozen in the middle
    second = ContinuedRunFolder(tmp_path)
    second.append_metrics({"step": 2})
    assert frozen.is_taken and not second.is_taken and is_being_written(tmp_path)
    frozen.append_metrics({"step": 3, "text": "too late"})
    for write in (frozen.write_summary, frozen.add_environment):
        with pytest.raises(OSError, match="another process goes on with the run"):
            write({"exit_code": 4})
    with pytest.raises(OSError, match="another process goes on with the run"):
        frozen.rewind(0)
    third = ContinuedRunFolder(tmp_path)  # the second one's host freezes as well
    third.append_metrics({"step": 3})
    second.append_metrics({"step": 4, "text": "too late"})
    assert second.is_taken and not third.is_taken
    third.write_summary({"exit_code": 0})
    for folder in (frozen, third, second):
        folder.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"exit_code": 0}
    assert not is_being_written(tmp_path)
    open_folder(tmp_path).close()  # as ever


@pytest.mark.parametrize("cut", ["", '{"step": 9', "x" * (TAIL_BYTES + 5)])
@pytest.mark.parametrize("sizes", [[], [1], [3, 70_000, 2, 200_000, 5], [TAIL_BYTES - 20] * 9, [40] * 5000])
def test_lines_from_the_last_to_the_first(tmp_path, sizes, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": at, "text": "y" * size}) + "\n" for at, size in enumerate(sizes)) + cut)
    assert list(iterate_metrics_backwards(path)) == read_metrics(path)[::-1]
    assert len(read_metrics(path)) == len(sizes)
