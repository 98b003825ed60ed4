"""The starts of a run, on real folders with real checkpoints: which one each begins with, and what is left behind."""

import io
import json
from functools import partial

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.elastic.coordinator.run_status import RunOutcome
from parallel3d.elastic.protocol.restart_policy import START_KEY, Restart, RestartPolicy, StartInstruction, Stop
from parallel3d.elastic.restart_manager import LauncherInfo, RestartManager
from parallel3d.errors import UserError
from parallel3d.monitor.run_folder import RunFolder, read_metrics
from parallel3d.monitor.sinks import RunReporter
from tests.support.small_checkpoints import save

LOST = RunOutcome(exit_code=3, message="the run can't go on: alas\nrank 1 was killed\n  log: somewhere")
DIVERGED = RunOutcome(exit_code=6, message="training has diverged in step 9: alas")


class Run:
    """One run in `folder`, and the records of its processes."""

    def __init__(self, folder, *, resume="never", max_restarts=3, launcher=None, skip=True):
        self.folder = folder
        self.restart_manager = RestartManager(
            directory=folder,
            open_folder=lambda history_until_step: RunFolder(
                folder, config="{}", environment={}, history_until_step=history_until_step
            ),
            make_report=partial(RunReporter, title="run", out=io.StringIO()),
            checkpoint_dir=CheckpointDirectory(folder / "checkpoints"),
            resume=resume,
            policy=RestartPolicy(max_restarts=max_restarts, backoff_s=1.0, max_backoff_s=8.0),
            skip_diverging_data=skip,
            launcher=launcher or LauncherInfo(),
        )
        self.report = self.restart_manager.begin()
        self.report.start()

    @property
    def start_instruction(self):
        return StartInstruction.from_json(json.loads(self.restart_manager.values[START_KEY]))

    def train(self, first, last, *, save_at=(), diverges=False):
        for step in range(first, last + 1):
            self.report.publish({"kind": "step", "step": step, "loss": 1.0, "step_s": 0.5})
            if step in save_at:
                save(self.folder / "checkpoints", step, keep_last=9)
        if diverges:
            self.report.publish({"kind": "diverged", "step": last, "data": {"read": last}})
        return self

    def end(self, outcome, *, stopped=lambda: False):
        self.report.pause()
        decision = self.restart_manager.next_action(self.report, outcome, stopped)
        self.report.start()
        return decision

    def close(self, exit_code=0):
        self.report.close("", exit_code=exit_code)
        return self.report._out.getvalue()

    def path(self, step):
        return str(self.folder / "checkpoints" / f"step-{step:08}")


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path).train(1, 9, save_at=(4, 8))


def lines(folder):
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "event" not in line]


def test_it_goes_on_from_the_newest_good_checkpoint(run, tmp_path):
    assert run.start_instruction == StartInstruction()
    shard = tmp_path / "checkpoints" / "step-00000008" / "rank-00000.safetensors"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    assert run.end(LOST) == Restart(step=4, wait_s=1.0)
    assert run.start_instruction == StartInstruction(attempt=1, checkpoint=run.path(4))
    assert CheckpointDirectory(tmp_path / "checkpoints").steps() == [4]
    out = run.close()
    assert f"checkpoint skipped: {shard} is damaged" in out
    assert (
        "restart 1 of 3 in 1 s from the checkpoint of step 4, 5 steps lost: the run can't go on: alas; rank 1 was kil"
        in out
    )
    assert lines(tmp_path) == [1, 2, 3, 4]


def test_from_the_start_where_there_is_nothing_else(tmp_path):
    run = Run(tmp_path).train(1, 3)
    assert run.end(LOST) == Restart(step=0, wait_s=1.0)
    assert run.start_instruction == StartInstruction(attempt=1)
    assert "restart 1 of 3 in 1 s from the start, 3 steps lost" in run.close() and lines(tmp_path) == []


def test_from_where_it_was_resumed(tmp_path):
    save(tmp_path / "elsewhere", 5)
    checkpoint = str(tmp_path / "elsewhere" / "step-00000005")
    run = Run(tmp_path / "run", resume=checkpoint)
    assert run.start_instruction == StartInstruction(checkpoint=checkpoint)
    assert run.train(6, 7).end(LOST) == Restart(step=5, wait_s=1.0)
    assert run.start_instruction == StartInstruction(attempt=1, checkpoint=checkpoint)
    run.close()


def test_after_a_start_without_a_checkpoint_the_earlier_ones_are_named(run, tmp_path):
    """Such as one that ended before its first step: it has moved the checkpoints of the run before."""
    run.close()
    Run(tmp_path).close(exit_code=1)
    archived = tmp_path / "checkpoints" / "previous-1" / "step-00000008"
    lost = Run(tmp_path, resume="auto")
    assert lost.start_instruction == StartInstruction()
    assert f"an earlier run's are kept, and run.resume={archived} continues that" in lost.close()
    found = Run(tmp_path, resume=str(archived))
    assert found.start_instruction == StartInstruction(checkpoint=str(archived))
    assert "resume from" not in found.close()


def test_divergences_go_back_further_and_leave_their_data_out(run, tmp_path):
    run.train(10, 10, diverges=True)
    assert run.end(DIVERGED) == Restart(step=8, wait_s=1.0)
    assert run.start_instruction == StartInstruction(attempt=1, checkpoint=run.path(8), data={"read": 10})
    run.train(9, 9)
    assert run.end(LOST) == Restart(step=8, wait_s=2.0)
    assert run.start_instruction.data == {"read": 10}, "its checkpoint is from before"
    run.train(9, 9, diverges=True)
    assert run.end(DIVERGED) == Restart(step=4, wait_s=4.0)
    assert run.start_instruction == StartInstruction(attempt=3, checkpoint=run.path(4), data={"read": 9})
    assert CheckpointDirectory(tmp_path / "checkpoints" / "previous-1").steps() == [8]
    out = run.close()
    assert "the data of steps 9 to 10 is skipped: t" in out and "the data of steps 5 to 9 is skipped: t" in out
    assert (
        "restart 2 of 3 in 2 s from the checkpoint of step 8, 1 step lost, the data before the divergence" in out
    )


def test_the_data_may_come_again(tmp_path):
    run = Run(tmp_path, skip=False).train(1, 9, save_at=(4,), diverges=True)
    assert run.end(DIVERGED) == Restart(step=4, wait_s=1.0)
    assert run.start_instruction.data is None and "left out" not in run.close()


def test_a_stop_and_a_launcher_that_restarts_by_itself(run, tmp_path):
    assert run.end(LOST, stopped=lambda: True) == Stop()
    run.close()
    launched = Run(tmp_path / "launched", launcher=LauncherInfo(by_launcher=True, run_id="a")).train(1, 2)
    assert launched.end(LOST) == Stop()
    assert "restart.max_restarts is ignored" in launched.close()


def test_a_stop_while_a_checkpoint_is_read(run):
    answers = iter([False, False, True])  # the second is asked in the first file
    assert run.end(LOST, stopped=lambda: next(answers, True)) == Stop(why="stopped before the restart")
    assert run.start_instruction == StartInstruction() and "restart" not in run.close()


def launched(folder, attempt, run_id="a", **fields):
    return Run(folder, launcher=LauncherInfo(by_launcher=True, run_id=run_id, attempt=attempt), **fields)


def test_after_a_launchers_restart_the_run_goes_on(tmp_path):
    first = launched(tmp_path, 0).train(1, 9, save_at=(4, 8), diverges=True)
    first.end(DIVERGED)
    first.close(6)
    second = launched(tmp_path, 1)
    assert second.start_instruction == StartInstruction(attempt=1, checkpoint=second.path(8), data={"read": 9})
    second.train(9, 12, save_at=(12,))
    second.report.publish({"event": "failure", "text": "rank 0 was killed"})
    out = second.close(3)  # its end was not recorded
    assert "restart 1 from the checkpoint of step 8, 1 step lost, the data of step 9 is skipped: training has" in out
    third = launched(tmp_path, 2)
    assert third.start_instruction == StartInstruction(attempt=2, checkpoint=third.path(12))
    assert "0 steps lost: rank 0 was killed" in third.train(13, 14).close()
    assert lines(tmp_path) == list(range(1, 15)) and not (tmp_path / "previous-1").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["restarts"], summary["lost_steps"], summary["productive_s"]) == (2, 1, 7.0)


def test_another_launchs_run_is_not_gone_on_with(tmp_path):
    launched(tmp_path, 0).train(1, 5, save_at=(4,)).close(3)
    other = launched(tmp_path, 1, run_id="b")
    assert other.start_instruction == StartInstruction() and (tmp_path / "previous-1").exists()
    other.close()


def test_a_launchers_restarts_end_where_no_older_checkpoint_is_left(tmp_path):
    first = launched(tmp_path, 0).train(1, 5, save_at=(4,), diverges=True)
    first.end(DIVERGED)
    first.close(6)
    second = launched(tmp_path, 1).train(5, 5, diverges=True)
    second.end(DIVERGED)
    second.close(6)
    with pytest.raises(UserError, match="no older checkpoint is left"):
        launched(tmp_path, 2)


def test_checkpoints_that_cannot_be_listed_end_neither_a_finished_run_nor_a_start_silently(run, tmp_path):
    """A file stands where the folder was: a finished run ends as it did, a lost one stops and says why."""
    folder = tmp_path / "checkpoints"
    folder.rename(tmp_path / "moved")
    folder.write_text("not a folder")
    assert run.end(RunOutcome(exit_code=0, message="")) == Stop()
    lost = run.end(LOST)
    assert isinstance(lost, Stop) and f"{folder} cannot be listed (Not a directory)" in lost.why
    run.close()
    with pytest.raises(UserError, match="cannot be listed"):
        Run(tmp_path, resume="auto")
