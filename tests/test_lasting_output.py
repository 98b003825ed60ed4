"""Output whose reader goes away: real pipes, a closed terminal, a full disk."""

import io
import os
import pty
import sys
from pathlib import Path

import pytest

from parallel3d.lasting_output import LastingStream, lasting_output


def pipe():
    reader, writer = os.pipe()
    return reader, os.fdopen(writer, "w")


def test_without_a_reader_lines_are_dropped_and_it_is_said_once():
    reader, stream = pipe()
    told = []
    lasting = LastingStream(stream, on_gone=lambda: told.append("gone"))
    print("read", file=lasting, flush=True)
    assert os.read(reader, 100) == b"read\n" and not told
    os.close(reader)
    for _ in range(3):
        print("dropped", file=lasting, flush=True)
    assert told == ["gone"]
    stream.close()  # what it still held goes nowhere, so that the end of the process does not fail either


def test_a_terminal_that_was_closed():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        told = []
        lasting = LastingStream(stream, on_gone=lambda: told.append("gone"))
        assert lasting.isatty()
        print("seen", file=lasting, flush=True)
        os.close(leader)
        print("dropped", file=lasting, flush=True)
        assert told == ["gone"]


def test_on_a_full_disk_lines_are_lost_and_nobody_is_said_to_be_gone():
    told = []
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w") as stream:
        lasting = LastingStream(stream, on_gone=lambda: told.append("gone"))
        print("x", file=lasting, flush=True)
        lasting.write("x" * 100_000)
        assert not told
        print("x", file=stream, flush=True)


def test_the_note_goes_to_standard_error_and_both_are_given_back(monkeypatch):
    reader, stream = pipe()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    os.close(reader)
    with lasting_output(Path("runs/a")):
        print("dropped", flush=True)
        print("dropped", flush=True)
        print("an error", file=sys.stderr)
    note, error = err.getvalue().splitlines()
    assert note.endswith("its records are in runs/a") and error == "an error"
    assert sys.stdout is stream and sys.stderr is err
    stream.close()
