"""A run that diverges ends on all ranks after the same entry, and leaves the checkpoints from before it, whole."""

import time
from dataclasses import replace

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.errors import EXIT_DIVERGED, Diverged
from parallel3d.precision.loss_scale import LossScale
from parallel3d.trainer.divergence_check import find_divergence
from parallel3d.trainer.entry import Entry
from parallel3d.trainer.loop import Trainer
from parallel3d.trainer.reporting import StepReporter
from parallel3d.trainer.resume import data_position_to_json, skip_data_to
from parallel3d.trainer.state import TrainState
from tests.support.kill_cells import kill_fault
from tests.trainer.test_checkpointing import GatedDisk, WatchedSaver, config_of, train

START = TrainState(cursors=((0, 0, 0),))
FP16 = replace(START, loss_scale=LossScale(scale=4.0, growth_interval=3))


def after(state: TrainState, *finite: bool) -> TrainState:
    """The state after further iterations, which were finite or not."""
    for is_finite in finite:
        entry = Entry(
            iteration=state.iteration + 1,
            squared_norm=1.0,
            finite=is_finite,
            num_target_tokens=8,
            loss_sum=8.0,
            stop=False,
            leave=False,
            cursors=state.cursors,
        )
        state = state.apply(entry)
    return state


@pytest.mark.parametrize(
    "state, has_diverged",
    [
        (START, False),
        (after(START, True), False),
        (after(START, True, False), True),
        (after(START, False, True), False),
        (after(FP16, False, False), False),  # the scale is 1 from here on
        (after(FP16, False, False, False), False),
        (after(FP16, False, False, False, False), True),
        (after(FP16, False, False, False, True, False), False),
    ],
)
def test_what_is_a_sign(state, has_diverged):
    assert bool(find_divergence(state)) == has_diverged
    assert not find_divergence(state, since=state.iteration)


def test_a_place_in_the_data_is_moved_alone():
    there = replace(after(START, True, True), cursors=((0, 7, 3),))
    here = after(START, True)
    moved = skip_data_to(here, data_position_to_json(there))
    left_out = there.tokens_read - here.tokens_read
    assert moved == replace(here, cursors=there.cursors, tokens_read=there.tokens_read, tokens_dropped=left_out)
    assert moved.tokens_seen == here.tokens_seen


def diverging(**checkpoint):
    """A learning rate at which the second step is not finite any more."""
    config = config_of("pp2-dp2", every=1, **checkpoint)
    optimizer = config.optimizer.model_copy(update={"learning_rate": 1e38})
    lr_schedule = config.lr_schedule.model_copy(update={"warmup_steps": 0})
    return config.model_copy(update={"optimizer": optimizer, "lr_schedule": lr_schedule})


def test_a_run_that_diverges(tmp_path):
    with pytest.raises(Diverged, match="training has diverged in step 2: the loss or a gradient is not finite") as told:
        train(diverging(), tmp_path)
    assert told.value.exit_code == EXIT_DIVERGED
    assert (
        CheckpointDirectory(tmp_path).steps() == [1]
        and CheckpointDirectory(tmp_path).find_newest_valid().index.step == 1
    )


@pytest.mark.parametrize("rank, phase", [(3, "update"), (0, "all_reduce")])
def test_a_death_in_the_step_that_diverges(tmp_path, rank, phase):
    """What comes after its recovery is the same end. A save that was under way is lost with the generation."""
    with pytest.raises(Diverged, match="training has diverged in step 2"):
        train(diverging(), tmp_path, [kill_fault(rank, phase, 2)])
    assert set(CheckpointDirectory(tmp_path).steps()) <= {1}


def test_a_save_under_way_is_finished_first(tmp_path, monkeypatch):
    """Nothing gets on disk before the run has diverged."""
    disk = GatedDisk(1)

    def finish(self):
        disk.gate.set()
        return super(WatchedSaver, self).finish()

    monkeypatch.setattr(WatchedSaver, "finish", finish)
    with pytest.raises(Diverged):
        train(diverging(), tmp_path, disk=disk)
    assert CheckpointDirectory(tmp_path).find_newest_valid().index.step == 1


def test_no_rank_ends_before_the_leader_has_reported_it(tmp_path, monkeypatch):
    """The first error ends the run for the coordinator, which needs to know what data a restart must leave out."""
    happened = []
    report, end = StepReporter.diverged, Trainer._end_diverged

    def report_late(self, reason):
        if self._rank.is_leader:
            time.sleep(0.2)
            happened.append("reported")
        report(self, reason)

    def end_diverged(self):
        try:
            end(self)
        finally:
            happened.append("ended")

    monkeypatch.setattr(StepReporter, "diverged", report_late)
    monkeypatch.setattr(Trainer, "_end_diverged", end_diverged)
    with pytest.raises(Diverged):
        train(diverging(), tmp_path)
    assert happened == ["reported", *["ended"] * 4]
