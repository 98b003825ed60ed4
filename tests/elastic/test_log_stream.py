"""A worker's output on a full disk: the real /dev/full."""

import os

import pytest

from parallel3d.elastic.worker.process import LogStream


def test_a_full_disk_loses_lines_and_raises_nothing():
    with open("/dev/full", "wb", buffering=0) as full:
        with pytest.raises(OSError, match="No space left"):
            full.write(b"x")
        stream = LogStream(full.fileno())
        print("to nowhere", file=stream, flush=True)
        assert stream.write("x") == 1 and stream.fileno() == full.fileno()


def test_lines_are_there_at_once(tmp_path):
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    print("caf\u00e9 \udc80", file=LogStream(descriptor))
    assert (tmp_path / "log").read_text() == "caf\u00e9 \\udc80\n"
    os.close(descriptor)
