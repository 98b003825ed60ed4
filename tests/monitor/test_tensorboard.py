"""Event files: known checksums, what a run's lines become, and bytes that TensorBoard 2.21 has read."""

from __future__ import annotations

import io
import math
import struct

import pytest

from parallel3d.monitor.run_folder import RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.monitor.tensorboard import TensorBoardFile, crc32c, encode_event, encode_record, scalars

LINES = [
    {"step": 1, "loss": 2.5, "num_updates": 1, "grad_norm": None, "lr": 1e-3},
    {"event": "notice", "text": "hello"},
    {"event": "evaluation", "step": 1, "loss": 2.0, "time": 5.0},
    {"step": 300, "loss": 1e300, "lr": 2},
]


def read(path):
    """(step, {tag: value}) of every record, by the format's own rules; checks the framing."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        message, data = data[12 : 12 + length], data[16 + length :]
        found.append(decode_event(message))
    return found


def decode_event(message):
    step, values = 0, {}
    for number, content in fields(message):
        if number == 2:
            step = content
        if number == 5:
            for _, value in fields(content):
                tag, number_bits = (part for _, part in fields(value))
                values[tag.decode()] = struct.unpack("<f", number_bits)[0]
    return step, values


def fields(message):
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        kind = key & 7
        if kind == 0:
            content, at = varint(message, at)
        else:
            size, at = varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            content, at = message[at : at + size], at + size
        yield key >> 3, content


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


@pytest.mark.parametrize(
    "data, crc", [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (b"", 0)]
)
def test_checksums_as_published(data, crc):
    """RFC 3720, appendix B.4, and the check value of CRC-32C."""
    assert crc32c(data) == crc


def test_the_bytes_of_one_record():
    message = encode_event(1.5, step=300, values={"train/loss": 2.5})
    assert message.hex() == "09000000000000f83f10ac022a130a110a0a747261696e2f6c6f73731500002040"
    assert encode_record(b"").hex() == "0000000000000000" + "29039807" + "d8ea82a2"


def test_lines_become_curves(tmp_path):
    file = TensorBoardFile(tmp_path / "deep" / "er", started_at=1000.0, history=LINES[:3])
    file.add(LINES[3], 1001.0)
    file.close()
    (path,) = (tmp_path / "deep" / "er").iterdir()
    start, first, evaluation, last = read(path)
    assert start == (0, {}) and path.name == "events.out.tfevents.1000.parallel3d"
    assert first == (1, {"train/loss": 2.5, "train/lr": pytest.approx(1e-3)})
    assert evaluation == (1, {"evaluation/loss": 2.0})
    assert last[0] == 300 and math.isinf(last[1]["train/loss"]) and last[1]["train/lr"] == 2.0


def test_what_is_no_number_is_no_curve():
    assert dict(scalars({"event": "membership", "step": 3, "generation": 1})) == {}
    assert dict(scalars({"step": 3, "loss": "nan", "flag": True})) == {}


def test_a_report_that_goes_on_has_whole_curves(tmp_path):
    for number in (1, 2):
        folder = RunFolder(tmp_path, config="{}", environment={}, history_until_step=number - 1)
        report = RunReporter(folder, title="a", tensorboard=True, out=io.StringIO(), err=io.StringIO())
        report.start()
        report.publish({"kind": "step", "step": number, "loss": 4.0 / number, "step_s": 1.0})
        report.close("", exit_code=0)
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert [(step, values["train/loss"]) for step, values in read(path)[1:]] == [(1, 4.0), (2, 2.0)]
    assert (tmp_path / "previous-1" / "tensorboard").is_dir()


def test_a_folder_that_can_not_be_written_costs_the_curves_alone(tmp_path):
    folder, err = RunFolder(tmp_path, config="{}", environment={}), io.StringIO()
    (tmp_path / "tensorboard").write_text("in the way")
    report = RunReporter(folder, title="a", tensorboard=True, out=io.StringIO(), err=err)
    report.start()
    for number in (1, 2):
        report.publish({"kind": "step", "step": number, "loss": 1.0, "step_s": 1.0})
    report.close("", exit_code=0)
    assert "can't write" in err.getvalue() and (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
