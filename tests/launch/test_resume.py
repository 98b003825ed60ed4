"""launch/train.py killed, stopped, damaged: a run goes on from its newest good checkpoint as if nothing had been."""

import json
import os
import signal
import time

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory
from tests.support.launch_runs import PATIENCE_S, finish, metrics, start, wait_for_step

pytestmark = pytest.mark.slow
NUM_STEPS = 40
RESUME = ("checkpoint.every=4", "run.resume=auto", f"run.num_steps={NUM_STEPS}")
UNDISTURBED = RESUME
SHORT = "run.num_steps=16"


def losses(run):
    return {line["step"]: line["loss"] for line in metrics(run)}


def wait_for_checkpoint(run, timeout=PATIENCE_S):
    deadline = time.monotonic() + timeout
    while not CheckpointDirectory(run / "checkpoints").steps():
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.02)


@pytest.mark.full
def test_everything_is_killed_and_the_curve_is_the_undisturbed_one(config_file, tmp_path, undisturbed):
    run = tmp_path / "run"
    stalled = 'elastic.faults=[{"rank": 0, "step": 36, "phase": "forward", "kind": "stop"}]'
    patient = 'elastic.heartbeat_timeout={"min_s": 600.0, "max_s": 600.0}'
    process = start("--config", config_file, *RESUME, stalled, patient)  # step 36 never ends
    try:
        wait_for_step(run, 33)  # what the leader had still to send when it was stopped never comes
        wait_for_checkpoint(run)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    newest = CheckpointDirectory(run / "checkpoints").steps()[-1]
    code, out, err = finish(start("--config", config_file, *RESUME))
    assert code == 0, out + err
    assert f"resuming from {run}/checkpoints/step-{newest:08}, after step {newest}" in out
    assert losses(run) == undisturbed(config_file)
    assert [line["step"] for line in metrics(run)] == list(range(1, 41))
    told = [line["step"] for line in metrics(run / "previous-1")]
    assert told == list(range(1, len(told) + 1)) and 33 <= len(told) <= 35
    *_, before, last = CheckpointDirectory(run / "checkpoints").steps()
    assert last == 40

    shard = next((run / "checkpoints" / "step-00000040").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    code, out, err = finish(start("--config", config_file, *RESUME, "parallel.pp_size=1", "parallel.dp_size=1"))
    assert code == 0, out + err
    assert f"checkpoint skipped: {shard} is damaged" in out and f"after step {before}" in out
    assert "parallel.pp_size 2 -> 1" in out
    assert losses(run) == pytest.approx(undisturbed(config_file), rel=1e-4)
    aside = run / "checkpoints" / "previous-1"
    assert CheckpointDirectory(aside).steps() == [40] and 40 in CheckpointDirectory(run / "checkpoints").steps()

    code, out, err = finish(start("--config", config_file, f"run.resume={aside}/step-00000040"))
    assert code == 2 and f"{aside}/step-00000040/{shard.name} is damaged" in err and "Traceback" not in out + err

    shorter = "data.document_chars=300"
    code, out, err = finish(start("--config", config_file, f"run.resume={run}/checkpoints/latest", shorter))
    assert code == 2 and "the text differs" in err and "document_chars was" in err, out + err


@pytest.mark.sample(1)
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_saves_and_the_run_goes_on(config_file, tmp_path, undisturbed, number, code):
    run = tmp_path / "run"
    process = start("--config", config_file, *RESUME[1:], "checkpoint.every=null", SHORT)
    wait_for_step(run, 3)
    process.send_signal(number)
    ended, out, err = finish(process)
    assert ended == code and "saved step" in out, out + err
    (step,) = CheckpointDirectory(run / "checkpoints").steps()
    assert step == json.loads((run / "summary.json").read_text())["steps"]
    assert f"to continue after step {step}, run the same command with run.resume=auto" in err
    ended, out, err = finish(start("--config", config_file, *RESUME, SHORT))
    assert ended == 0 and f"after step {step}" in out, out + err
    assert losses(run) == undisturbed(config_file, SHORT)


@pytest.mark.full
def test_a_fresh_run_in_the_same_folder_leaves_the_old_checkpoints_alone(config_file, tmp_path):
    run = tmp_path / "run"
    for _ in range(2):
        code, out, err = finish(start("--config", config_file, "run.num_steps=2"))
        assert code == 0, out + err
    assert "moved checkpoints that this run does not continue" in out
    assert (
        CheckpointDirectory(run / "checkpoints" / "previous-1").steps()
        == [2]
        == CheckpointDirectory(run / "checkpoints").steps()
    )


def test_a_path_that_is_not_a_checkpoint(config_file, tmp_path):
    code, out, err = finish(start("--config", config_file, "run.resume=Auto"))
    assert code == 2 and "must be never, auto or a directory" in err
    code, out, err = finish(start("--config", config_file, f"run.resume={tmp_path}"))
    assert code == 2 and "index.json can't be read" in err and "Traceback" not in out + err


@pytest.mark.full
def test_a_folder_that_can_not_be(config_file, tmp_path):
    """A file stands in its place: that is said before anything starts."""
    (tmp_path / "file").write_text("")
    code, out, err = finish(start("--config", config_file, f"checkpoint.directory={tmp_path}/file/checkpoints"))
    assert code == 2 and "file/checkpoints cannot be listed (Not a directory)" in err and "Traceback" not in out + err
