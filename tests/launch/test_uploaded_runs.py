"""checkpoint.upload: a run's checkpoints in a remote store, beside training; a run goes on from there."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.remote_directory import RemoteDirectory
from tests.support.folder_store import SECRET, site
from tests.support.launch_runs import PATIENCE_S, finish, metrics, start, wait_for_change, wait_for_step, workers_of

pytestmark = pytest.mark.slow
EVERY = ("checkpoint.every=4", "run.resume=auto", "lr_schedule.decay_steps=12")
UNDISTURBED = EVERY


def losses(run):
    return {line["step"]: line["loss"] for line in metrics(run)}


def complete(store):
    return [folder.step for folder, _ in RemoteDirectory(f"file://{store}").complete()]


def events(run):
    return [json.loads(line) for line in (run / "uploads.jsonl").read_text().rpartition("\n")[0].splitlines()]


def wait_until(holds, what, timeout=PATIENCE_S):
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.05)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The folder of a store that may misbehave, and its address."""
    for name, value in site(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "store", f"checkpoint.upload=folder://{tmp_path}/store"


def test_a_lost_disk(config_file, tmp_path, undisturbed):
    """A run ends, its whole folder is lost, and the same command goes on from the newest one in the store, bitwise."""
    run, store = tmp_path / "run", tmp_path / "store"
    upload = f"checkpoint.upload=file://{store}"
    code, out, err = finish(start("--config", config_file, *EVERY, upload, "run.num_steps=8"))
    assert code == 0 and f"checkpoint.upload: step 8 is at file://{store}" in err, out + err
    assert complete(store)[-1] == 8
    shutil.rmtree(run)
    code, out, err = finish(start("--config", config_file, *EVERY, upload))
    assert code == 0 and "step-00000008, after step 8" in out, out + err
    assert f"fetching file://{store}/step-00000008-" in err
    expected = undisturbed(config_file)
    assert losses(run) == {step: loss for step, loss in expected.items() if step > 8}
    assert complete(store)[-1] == 12 and CheckpointDirectory(run / "checkpoints").steps()[-1] == 12


@pytest.mark.full
def test_a_worker_is_killed_while_its_checkpoint_is_sent(config_file, tmp_path, store, undisturbed):
    """Training goes on without it, the upload is completed, and the checkpoint is what a new run resumes from."""
    run, (folder, upload) = tmp_path / "run", store
    Path(f"{folder}.slow").write_text("1.0")
    process = start("--config", config_file, *EVERY, upload, "run.num_steps=400")
    wait_until(lambda: list(folder.glob("step-*")), "an upload")
    os.kill(workers_of(process.pid)[-1], signal.SIGKILL)
    wait_for_change(run, 1)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 143, out + err
    (last,) = [step for step in complete(folder) if step == CheckpointDirectory(run / "checkpoints").steps()[-1]]
    before = losses(run)
    shutil.rmtree(run / "checkpoints")
    again = (f"run.resume=folder://{folder}", f"run.num_steps={last + 2}", "checkpoint.upload=null")
    code, out, err = finish(start("--config", config_file, EVERY[0], *again))
    assert code == 0 and f"after step {last}" in out, out + err
    assert sorted(losses(run)) == [last + 1, last + 2] and sorted(before) == list(range(1, last + 1))


@pytest.mark.full
def test_a_store_that_hangs_slows_nothing(config_file, tmp_path, store):
    """Steps and saves go on, and the end is bounded and says what is missing; the next start sends it."""
    run, (folder, upload) = tmp_path / "run", store
    process = start("--config", config_file, *EVERY, upload, "checkpoint.upload_end_wait_s=5", "run.num_steps=30")
    wait_until(lambda: (run / "metrics.jsonl").exists(), "the run")
    hang = Path(f"{folder}.hang")
    hang.touch()  # after the probe
    code, out, err = finish(process)
    assert code == 0 and "saved step 30" in out and complete(folder) == [], out + err
    assert f"are not at folder://{folder} (the time is over)" in err and "the next start of the run sends" in err
    hang.unlink()
    code, out, err = finish(start("--config", config_file, *EVERY, upload, "run.num_steps=31"))
    assert code == 0 and complete(folder)[-1] == 31, out + err


@pytest.mark.full
def test_a_store_that_fails_is_named_once_and_tried_again(config_file, tmp_path, store):
    run, (folder, upload) = tmp_path / "run", store
    fail = Path(f"{folder}.fail")
    stopped = 'elastic.faults=[{"rank": 0, "step": 30, "phase": "forward", "kind": "stop"}]'
    patient = 'elastic.heartbeat_timeout={"min_s": 600.0, "max_s": 600.0}'
    process = start("--config", config_file, *EVERY, upload, "run.num_steps=40", stopped, patient)
    wait_until(lambda: (run / "metrics.jsonl").exists(), "the run")
    fail.touch()
    wait_for_step(run, 28)
    uploads = run / "uploads.jsonl"
    wait_until(lambda: uploads.exists() and '"failed"' in uploads.read_text(), "the failure")
    fail.unlink()
    wait_until(lambda: complete(folder), "an upload")
    os.killpg(process.pid, signal.SIGKILL)
    out, err = process.communicate()
    lines = [line for line in err.splitlines() if line.startswith("checkpoint.upload:")]
    assert "ConnectionError, after 3 retries. step" in lines[0] and lines[0].endswith("training goes on"), lines
    assert [event["event"] for event in events(run)][:4] == ["uploading", "retry", "retry", "retry"]
    assert SECRET not in err + out + uploads.read_text()
    for file in run.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()


@pytest.mark.full
def test_what_can_not_be_written_is_refused(config_file, tmp_path, store):
    (tmp_path / "file").write_text("")
    refused = f"checkpoint.upload=file://{tmp_path}/file/store"
    code, out, err = finish(start("--config", config_file, refused))
    assert code == 2 and "can't be written: NotADirectoryError" in err and "Traceback" not in out + err, out + err
    assert "checkpoint.upload = " in err and not (tmp_path / "run").exists()
