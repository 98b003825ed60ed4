"""Disks as they fail: full, read-only, gone, with real workers on a real file system. Training goes on to its end.

A small file system needs a namespace of its own (unshare), and its files are seen through /proc/PID/root. Where that is
not allowed, these tests are left out; a file in the folder's place and a limit on the size of files need no such thing.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory
from tests.support.launch_runs import PATIENCE_S, TRAIN, finish, start, workers_of

pytestmark = pytest.mark.slow
MOUNT = 'mount -t tmpfs -o size=8m none "$0" && exec "$@"'
MANY_STEPS = ("run.num_steps=1000000", "checkpoint.every=2", "checkpoint.keep_last=1")
PP2 = ("parallel.pp_size=2", "parallel.dp_size=1")


def can_mount(folder):
    command = ["unshare", "-rm", "sh", "-c", MOUNT, folder, "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def begin_on(disk, *arguments):
    """The run, which alone sees a small file system at `disk`."""
    command = ["unshare", "-rm", "sh", "-c", MOUNT, disk, sys.executable, TRAIN, "--config", *arguments]
    return subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def stop(process):
    process.send_signal(signal.SIGINT)
    return finish(process)


class Notices:
    """The output of a run; each wait starts after the text that the previous one found."""

    def __init__(self, metrics: Path):
        self._metrics, self._seen = metrics, 0

    def wait_for(self, *words, timeout=PATIENCE_S):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            written = self._metrics.read_text() if self._metrics.exists() else ""
            lines = written.rpartition("\n")[0].splitlines()  # the last line may be half there
            for number, line in enumerate(lines[self._seen :], start=self._seen + 1):
                text = json.loads(line).get("text", "")
                if all(word in text for word in words):
                    self._seen = number
                    return text
            time.sleep(0.05)
        pytest.fail(f"the run has not printed {words}")


@pytest.mark.full
def test_full_then_read_only_then_gone(config_file, tmp_path):
    """Each trouble costs checkpoints and nothing else; when it is over the next save succeeds."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("this machine allows no namespace with a file system of its own")
    process = begin_on(disk, config_file, *PP2, *MANY_STEPS, f"checkpoint.directory={disk}/checkpoints")
    seen = Path(f"/proc/{process.pid}/root{disk}")
    checkpoints = CheckpointDirectory(seen / "checkpoints")
    notices = Notices(tmp_path / "run" / "metrics.jsonl")
    try:
        notices.wait_for("saved step")
        fill(seen / "filler")
        notices.wait_for("is abandoned", "No space left on device")
        assert checkpoints.find_newest_valid().path is not None
        (seen / "filler").unlink()
        notices.wait_for("saved step")

        remount(process, disk, "ro")
        notices.wait_for("is abandoned", "Read-only file system")
        found = checkpoints.find_newest_valid()
        assert found.path is not None and not found.damaged
        remount(process, disk, "rw")
        notices.wait_for("saved step")

        os.rename(seen / "checkpoints", seen / "gone")
        notices.wait_for("saved step")
        notices.wait_for("saved step")
        kept = os.open(seen, os.O_RDONLY)  # the file system, when its last process is gone
        code, out, err = stop(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    shutil.copytree(f"/proc/self/fd/{kept}/checkpoints", tmp_path / "copy", symlinks=True)
    os.close(kept)
    assert code == 130 and "Traceback" not in out + err, out + err
    steps = [line["step"] for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if "lr" in line]
    assert steps == list(range(1, len(steps) + 1))
    last = CheckpointDirectory(tmp_path / "copy").steps()[-1] + 2
    resume = f"run.resume={tmp_path}/copy/latest"
    code, out, err = finish(start("--config", config_file, *PP2, resume, f"run.num_steps={last}"))
    assert code == 0 and "resuming from" in out, out + err


def fill(path):
    """Takes all that is free."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def remount(process, disk, how):
    """Waits until no process writes: a file system with a file open for writing stays writable."""
    command = ["nsenter", "-U", "-m", "-t", process.pid, "--preserve-credentials"]
    command += ["mount", "-o", f"remount,{how}", disk]
    deadline = time.monotonic() + PATIENCE_S
    while subprocess.run([*map(str, command)], capture_output=True).returncode:
        assert time.monotonic() < deadline, "never remounted"
        time.sleep(0.01)


def test_the_whole_run_folder_on_a_full_disk(config_file, tmp_path):
    """Metrics, logs and a loss of a worker while nothing can be written: the run goes on, and its files are whole."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("this machine allows no namespace with a file system of its own")
    fault = 'elastic.faults=[{"rank": 1, "step": 30, "phase": "forward"}]'
    arguments = ["run.num_steps=60", "checkpoint.every=2", "checkpoint.retry_s=[0.1]", fault]
    arguments += [f"run.directory={disk}/run", "parallel.pp_size=1"]
    process = begin_on(disk, config_file, *arguments)
    seen = Path(f"/proc/{process.pid}/root{disk}")
    try:
        Notices(seen / "run" / "metrics.jsonl").wait_for("saved step")
        kept = os.open(seen, os.O_RDONLY)
        fill(seen / "filler")
        code, out, err = finish(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 0 and "Traceback" not in out + err, out + err
    assert "step 60/60" in out and "lost rank 1" in out and "No space left on device" in err
    run = Path(f"/proc/self/fd/{kept}/run")
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    found = CheckpointDirectory(run / "checkpoints").find_newest_valid()
    assert found.path is not None and not found.damaged
    os.close(kept)


@pytest.mark.full
def test_a_file_in_the_folders_place_and_files_that_may_not_grow(config_file, tmp_path):
    """What needs no rights: the folder vanishes and a file takes its name; then it may be a folder again."""
    checkpoints = tmp_path / "run" / "checkpoints"
    process = start("--config", config_file, *PP2, *MANY_STEPS)
    notices = Notices(tmp_path / "run" / "metrics.jsonl")
    try:
        notices.wait_for("saved step")
        while not checkpoints.is_file():
            shutil.rmtree(checkpoints, ignore_errors=True)
            try:
                checkpoints.touch(exist_ok=False)
            except OSError:
                continue
        notices.wait_for("is abandoned", "can't write its part", str(checkpoints))
        notices.wait_for("is abandoned", "can't write its part")
        checkpoints.unlink()
        notices.wait_for("saved step")
        limit_files(process.pid, 20_000)
        notices.wait_for("is abandoned", "File too large")
        found = CheckpointDirectory(checkpoints).find_newest_valid()
        assert found.path is not None and not found.damaged
        limit_files(process.pid, resource.RLIM_INFINITY)
        notices.wait_for("saved step")
        code, out, err = stop(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 130 and "saved step" in out and "Traceback" not in out + err, out + err
    last = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]
    assert CheckpointDirectory(checkpoints).find_newest_valid().path == CheckpointDirectory(checkpoints).path_of(last)


def limit_files(launcher, num_bytes):
    """How large files may get that the workers write."""
    for pid in workers_of(launcher):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
