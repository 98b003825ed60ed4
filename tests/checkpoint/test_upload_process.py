"""The process that uploads beside a run: a run folder that grows, and a store that is slow, hangs or fails."""

import json
import os
import signal
import time
from pathlib import Path

import fsspec
import pytest

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.fetch import FetchingDirectory, local_checkpoint
from parallel3d.checkpoint.remote_directory import RemoteDirectory
from parallel3d.checkpoint.store_process import check_target
from parallel3d.checkpoint.upload_process import UploadProcess
from parallel3d.commands import average, fetch, upload
from parallel3d.commands.upload_follower import RunLines
from parallel3d.errors import CheckpointError
from tests.support.folder_store import SECRET, FolderStore, site
from tests.support.small_checkpoints import assert_is, save

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path, monkeypatch):
    fsspec.register_implementation("folder", FolderStore, clobber=True)
    for name, value in site(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "store"


class Run:
    """What a run writes."""

    def __init__(self, path):
        self.path, self.checkpoints = path, path / "checkpoints"
        path.mkdir()

    def move_metrics(self):
        """A new start moves the file of the earlier one."""
        os.rename(self.path / "metrics.jsonl", self.path / f"metrics-{time.time()}.jsonl")

    def begin(self, step=0, event="started"):
        self.line(event=event, step=step, time=time.time())

    def line(self, **fields):
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def save(self, step, **facts):
        save(self.checkpoints, step, **facts)
        self.line(step=step)

    def uploads(self, store, *arguments, wait=100.0):
        return UploadProcess(self.path, [f"folder://{store}", "--keep-last", "2", *arguments], end_wait_s=wait)

    def events(self, name):
        path = self.path / "uploads.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]


def complete(store):
    return [folder.step for folder, _ in RemoteDirectory(f"file://{store}").complete()]


def wait_until(holds, what, timeout=300):
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.05)


def test_each_checkpoint_is_sent_and_the_last_one_at_the_end(tmp_path, store, capfd):
    run = Run(tmp_path / "run")
    with run.uploads(store):
        run.begin()
        run.save(1)
        wait_until(lambda: complete(store) == [1], "the first")
        run.save(2)
        run.save(3)
    assert complete(store) == [2, 3]
    assert f"checkpoint.upload: step 3 is at folder://{store}" in capfd.readouterr().err
    assert [event["step"] for event in run.events("settled")] == [0]
    run.move_metrics()
    with run.uploads(store):  # a run that goes on from step 2
        run.begin(2)
        os.rename(run.checkpoints / "step-00000003", tmp_path / "step-00000003")
        run.save(5)
    assert complete(store) == [2, 5]
    assert "step-00000003-" in run.events("set_aside")[0]["name"]


@pytest.mark.full
def test_after_a_rollback_the_line_that_was_left_is_cleared_at_once(tmp_path, store):
    """Not with the next checkpoint, nor a minute after the last pass."""
    run = Run(tmp_path / "run")
    with run.uploads(store):
        run.begin()
        run.save(1)
        run.save(2)
        wait_until(lambda: complete(store) == [1, 2] and run.events("settled"), "both")
        os.rename(run.checkpoints / "step-00000002", tmp_path / "step-00000002")
        run.begin(1, event="restart")
        wait_until(lambda: complete(store) == [1], "the rollback", timeout=45)


@pytest.mark.full
def test_it_is_killed_and_another_one_sends_the_rest(tmp_path, store):
    run = Run(tmp_path / "run")
    Path(f"{store}.slow").write_text("0.3")
    with run.uploads(store) as process:
        run.begin()
        run.save(1)
        wait_until(lambda: list(store.glob("step-*")), "an upload")
        os.kill(process._process.pid, signal.SIGKILL)
        run.save(2)
    assert complete(store) == [1, 2]


@pytest.mark.full
def test_a_store_that_falls_silent_ends_a_pass_and_the_next_one_goes_on(tmp_path, store):
    run, hang = Run(tmp_path / "run"), Path(f"{store}.hang")
    hang.touch()
    with run.uploads(store, "--stall", "3"):
        run.begin()
        run.save(1)
        wait_until(lambda: run.events("failed"), "the failure")
        hang.unlink()
        run.save(2)
        wait_until(lambda: complete(store) == [1, 2], "the next pass")
    assert run.events("failed")[0]["text"] == "nothing was heard from the store for 3 s"
    assert run.events("failed")[0]["behind"] == [1]


@pytest.mark.full
def test_a_store_that_hangs_at_the_end_is_not_waited_for(tmp_path, store, capfd):
    run = Run(tmp_path / "run")
    Path(f"{store}.hang").touch()
    with run.uploads(store, wait=4.0):
        run.begin()
        run.save(1)
        ended_s = time.monotonic()
    assert time.monotonic() - ended_s < 60 and complete(store) == []
    assert f"warning: step 1 is not at folder://{store} (the time is over)" in capfd.readouterr().err


@pytest.mark.full
def test_a_failing_store_at_the_end(tmp_path, store, capfd):
    """Three retries, one warning, a record of both, and the credentials in none of them."""
    run = Run(tmp_path / "run")
    Path(f"{store}.fail").touch()
    with run.uploads(store):
        run.begin()
        run.save(1)
    printed = capfd.readouterr().err
    assert printed.count("checkpoint.upload") == 1 and "ConnectionError, after 3 retries)" in printed
    assert [event["text"].partition("; ")[2] for event in run.events("retry")] == [
        f"retry {number} of 3 in {wait} s" for number, wait in ((1, 1), (2, 5), (3, 20))
    ]
    assert SECRET not in printed + (run.path / "uploads.jsonl").read_text()
    with pytest.raises(CheckpointError, match="can't be written: ConnectionError$"):
        check_target(f"folder://{store}")


@pytest.mark.full
def test_one_process_of_several_uploads_and_another_takes_over(tmp_path, store):
    """Two hosts of a run: the process that does not work waits for the lock of the one that does."""
    run = Run(tmp_path / "run")
    first = run.uploads(store).__enter__()
    with run.uploads(store):
        run.begin()
        run.save(1)
        wait_until(lambda: complete(store) == [1], "the first")
        os.kill(first._process.pid, signal.SIGKILL)
        first._process.wait(100)
        run.save(2)
        wait_until(lambda: complete(store) == [1, 2], "the second")


def test_from_there_to_every_reader(tmp_path, store, capsys):
    """upload by hand, fetch, an address in place of a path, a lost disk."""
    for step in (1, 2):
        save(tmp_path / "run" / "checkpoints", step)
    address = f"folder://{store}"
    assert upload.main([str(tmp_path / "run"), address]) == 0 and complete(store) == [1, 2]
    assert fetch.main([address, str(tmp_path / "fetched")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/fetched/step-00000002\n"
    assert fetch.main([address, str(tmp_path / "fetched"), "--newer-than", "2"]) == 2

    names = [path.name for path in sorted(store.iterdir())]
    path = local_checkpoint(f"{address}/{names[0]}", tmp_path / "cache")
    assert verify_checkpoint(path).step == 1
    Path(f"{store}.hang").touch()
    os.rename(store, tmp_path / "gone")
    assert local_checkpoint(f"{address}/{names[0]}", tmp_path / "cache") == path  # without the store
    with pytest.raises(CheckpointError, match=f"no complete checkpoint at {address}: there is none"):
        local_checkpoint(address, tmp_path / "cache")
    os.rename(tmp_path / "gone", store)

    assert_is(FetchingDirectory(tmp_path / "new", address).find_newest_valid(), 2)
    own = FetchingDirectory(tmp_path / "new", address).find_named(f"{address}/{names[0]}")
    assert own == tmp_path / "new" / "step-00000001"
    other = FetchingDirectory(tmp_path / "new", None).find_named(address)
    assert other.name == "step-00000002" and other.parent.parent == tmp_path / "new" / "fetched"
    arguments = [f"{address}/{names[0]}", f"{address}/{names[1]}", "--out", str(tmp_path / "mean")]
    assert average.main(arguments) == 0 and verify_checkpoint(tmp_path / "mean").facts.averaged


def test_a_store_that_is_gone(tmp_path, store):
    """Without a checkpoint here the run does not begin again from nothing; with one it goes on."""
    directory, address = FetchingDirectory(tmp_path / "run", f"nothing://{store}"), "nothing:// can't be opened"
    with pytest.raises(CheckpointError, match=rf"{address}.*Without it this run would begin again from step 0"):
        directory.find_newest_valid()
    save(tmp_path / "run", 1)
    found = directory.find_newest_valid()
    assert_is(found, 1)
    assert "none was looked for at the target" in found.damaged[0]


def test_the_beginning_of_a_run(tmp_path):
    """An earlier run's lines say nothing; a restart is a new beginning."""
    run = Run(tmp_path / "run")
    run.line(event="started", step=7, time=1000.0)
    run.line(step=8)
    lines = RunLines(run.path / "metrics.jsonl", since_s=2000.0)
    lines.read()
    assert (lines.beginning, lines.is_under_way) == (None, False)
    run.move_metrics()
    run.line(step=3)  # taken over from the earlier run
    run.line(event="started", step=3, time=2001.0)
    lines.read()
    assert (lines.beginning, lines.is_under_way) == ((2001.0, 3), False)
    run.line(step=4)
    lines.read()
    assert lines.is_under_way
    run.line(event="restart", step=3, time=2002.0)
    lines.read()
    assert (lines.beginning, lines.is_under_way) == ((2002.0, 3), True)
    joined = RunLines(run.path / "metrics.jsonl", since_s=3000.0)
    joined.read()
    assert not joined.is_under_way
    run.line(step=4)
    joined.read()
    assert (joined.beginning, joined.is_under_way) == (None, True)
