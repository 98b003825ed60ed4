"""TensorBoard files: the curves of a run, and the behaviour without the package or with a full disk."""

from __future__ import annotations

import io
import math
import struct

import pytest

from parallel3d.errors import ConfigError
from parallel3d.monitor.run_folder import ContinuedRunFolder, RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.monitor.tensorboard import TensorBoardFile, check_tensorboard, scalars

LINES = [
    {"step": 1, "loss": 2.5, "num_updates": 1, "grad_norm": None, "lr": 1e-3},
    {"event": "notice", "text": "hello"},
    {"event": "evaluation", "step": 1, "loss": 2.0, "time": 5.0},
    {"step": 300, "loss": 1e300, "lr": 2},
]


def read(path):
    """(step, {tag: value}) of every event; the first one, the file's version, has no value."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        found.append((event.step, {value.tag: value.simple_value for value in event.summary.value}))
        data = data[16 + length :]
    return found


def test_lines_become_curves(tmp_path):
    pytest.importorskip("tensorboardX")
    file = TensorBoardFile(tmp_path / "deep" / "er", started_at=1000.0, history=LINES[:3])
    file.add(LINES[3], 1001.0)
    (path,) = (tmp_path / "deep" / "er").iterdir()
    start, first, evaluation, last = read(path)  # flushed: the file is still open
    file.close()
    assert start == (0, {}) and path.name.startswith("events.out.tfevents.")
    assert first == (1, {"train/loss": 2.5, "train/lr": pytest.approx(1e-3)})
    assert evaluation == (1, {"evaluation/loss": 2.0})
    assert last[0] == 300 and math.isinf(last[1]["train/loss"]) and last[1]["train/lr"] == 2.0


def test_values_that_are_not_numbers_make_no_curve():
    assert dict(scalars({"event": "membership", "step": 3, "generation": 1})) == {}
    assert dict(scalars({"step": 3, "loss": "nan", "flag": True})) == {}


def test_a_resumed_report_has_whole_curves(tmp_path):
    pytest.importorskip("tensorboardX")
    for number in (1, 2):
        folder = RunFolder(tmp_path, config="{}", environment={}, history_until_step=number - 1)
        report = RunReporter(folder, title="a", tensorboard=True, out=io.StringIO(), err=io.StringIO())
        report.start()
        report.publish({"kind": "step", "step": number, "loss": 4.0 / number, "step_s": 1.0})
        report.close("", exit_code=0)
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert [(step, values["train/loss"]) for step, values in read(path)[1:]] == [(1, 4.0), (2, 2.0)]
    assert (tmp_path / "previous-1" / "tensorboard").is_dir()


def test_a_process_that_takes_over_goes_on_with_the_curves(tmp_path):
    pytest.importorskip("tensorboardX")
    for number, folder in enumerate([RunFolder(tmp_path, config="{}", environment={}), None], start=1):
        folder = folder or ContinuedRunFolder(tmp_path)
        report = RunReporter(folder, title="a", tensorboard=True, out=io.StringIO(), err=io.StringIO())
        report.start()
        report.publish({"kind": "step", "step": number, "loss": 4.0 / number, "step_s": 1.0})
        report.close("", exit_code=0)
    curves = [read(path)[1:] for path in (tmp_path / "tensorboard").iterdir()]
    points = sorted((step, values["train/loss"]) for curve in curves for step, values in curve)
    assert points == [(1, 4.0), (2, 2.0)]


def test_a_folder_that_can_not_be_written_costs_the_curves_alone(tmp_path):
    pytest.importorskip("tensorboardX")
    folder, err = RunFolder(tmp_path, config="{}", environment={}), io.StringIO()
    (tmp_path / "tensorboard").write_text("in the way")
    report = RunReporter(folder, title="a", tensorboard=True, out=io.StringIO(), err=err)
    report.start()
    for number in (1, 2):
        report.publish({"kind": "step", "step": number, "loss": 1.0, "step_s": 1.0})
    report.close("", exit_code=0)
    assert "can't write" in err.getvalue() and (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_missing_package_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("parallel3d.monitor.tensorboard.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="monitor.tensorboard.*tensorboardX, which is not installed"):
        check_tensorboard()
