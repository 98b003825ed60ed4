"""Starts launch/train.py as a user does, waits for it, and reads what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

TRAIN = str(Path(__file__).parents[2] / "launch" / "train.py")
PATIENCE_S = 300.0
"""For anything that a run does. Machines differ by far in speed, and this is only waited for by a test that fails."""
LAST_CHARACTERS = 6000
"""Of each text that a failed test leaves."""
STARTED: list[subprocess.Popen] = []
"""What tests have started; what a failed one leaves is killed at its end (tests/launch/conftest.py)."""


def start(*arguments, launcher=(), train=TRAIN):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = subprocess.Popen(
        [sys.executable, *launcher, train, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def finish(process, timeout=PATIENCE_S):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
    return process.returncode, out, err


def last_words(process, folder, stacks_s=3.0):
    """Kills a run; returns what it has printed and the ends of the logs in `folder`, with the stacks of its workers."""
    process.send_signal(signal.SIGUSR1)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=stacks_s)
    process.kill()  # all that it has started ends with it
    words = "\n".join(filter(None, process.communicate(timeout=300)))
    logs = sorted(folder.rglob("*.log"))
    return "\n".join([words[-LAST_CHARACTERS:], *(f"{log.name}:\n{_end(log)}" for log in logs)])


def _end(log):
    return log.read_text(errors="replace")[-LAST_CHARACTERS:]


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    return [line for line in lines if "event" not in line]


def wait_for_step(run, step, timeout=PATIENCE_S):
    _wait_for(lambda: len(metrics(run)) >= step, run, f"step {step}", timeout, pause_s=0.05)


def wait_for_change(run, number, timeout=PATIENCE_S):
    _wait_for(lambda: count_events(run, "membership") >= number, run, f"change {number}", timeout, pause_s=0.05)


def wait_for_event(run, kind):
    _wait_for(lambda: count_events(run, kind), run, f"event {kind!r}", PATIENCE_S, pause_s=0.002)


def count_events(run, kind):
    return (run / "metrics.jsonl").read_text().count(f'"event": "{kind}"')


def _wait_for(condition, run, what, timeout, *, pause_s):
    """Waits until the folder of a run meets a condition; fails if all that the test has started ends before."""
    deadline, has_ended = time.monotonic() + timeout, False
    while not ((run / "metrics.jsonl").exists() and condition()):
        if has_ended:
            pytest.fail("\n".join([f"{what} never came", *(_output(process) for process in STARTED)]))
        assert time.monotonic() < deadline, f"{what} never came"
        has_ended = bool(STARTED) and all(process.poll() is not None for process in STARTED)
        time.sleep(pause_s)


def _output(process):
    is_unread = process.stdout is not None and not process.stdout.closed
    words = "\n".join(filter(None, process.communicate(timeout=300))) if is_unread else ""
    return f"ended with code {process.returncode}\n{words[-LAST_CHARACTERS:]}"


def children_of(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(child) for child in found.stdout.split()]


def name_of(pid):
    """p3d-guardian, p3d-coordinator, p3d-rank-0, ...; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def child_of(stub_pid, name):
    """The process of a stub's guardian or coordinator, once it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := [pid for pid in children_of(stub_pid) if name_of(pid) == f"p3d-{name}"]):
        for stub in STARTED:
            if stub.pid == stub_pid and stub.poll() is not None:
                pytest.fail(f"no {name}: the run has ended with code {stub.poll()}\n" + "\n".join(stub.communicate()))
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.01)
    return found[0]


def workers_of(stub_pid):
    return children_of(child_of(stub_pid, "guardian"))
