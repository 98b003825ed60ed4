"""Runs that save, in threads with the real trainer: they go on bitwise, through deaths and bad disks."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from parallel3d.checkpoint.directory import CheckpointDirectory, verify_checkpoint
from parallel3d.checkpoint.disk import Disk
from parallel3d.inprocess.harness import run_elastic_in_threads
from parallel3d.trainer.checkpointing import AsyncSaver
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.resume import resume
from tests.support import tiny_runs
from tests.support.kill_cells import kill_fault
from tests.support.saved_layouts import TEXT, assert_equal, read_all, run_layout
from tests.support.thread_kills import MONITORED, fault_hooks

LAYOUTS = {
    "cube": dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True),
    "pp2-dp2": dict(pp_size=2, dp_size=2),
    "pp2-dp3": dict(pp_size=2, dp_size=3),
    "dp3-zero0": dict(dp_size=3, zero_stage=0),
    "pp2-interleaved": dict(pp_size=2, schedule="interleaved", virtual_stages=2),
    "stages-2-1": dict(pp_size=2, stage_replicas=[2, 1]),
    "one": dict(),
}


def config_of(layout, *, policy="fp32", sums="float", model=(), num_steps=6, every=3, **checkpoint):
    shape = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, hidden_dropout=0.1)
    return tiny_runs.make_config(
        model=shape | dict(model),
        parallel=dict(bucket_mib=0.003, **LAYOUTS[layout]),
        batch=dict(global_batch_size=6, micro_batch_size=1, sequence_length=8),
        precision=dict(policy=policy, sums=sums),
        lr_schedule=dict(warmup_steps=2, decay_steps=6),
        run=dict(num_steps=num_steps, evaluate_every=2, evaluate_batches=1),
        checkpoint=dict(every=every, keep_last=9, **checkpoint),
    )


class WatchedSaver(AsyncSaver):
    """Opens a gate in front of the disk where a save has been given up, or skipped."""

    def begin_generation(self):
        texts = super().begin_generation()
        return self._open_gate(texts, self._rank.current.number > 0)

    def begin(self, training_loss):
        was_busy = self._save is not None
        return self._open_gate(super().begin(training_loss), was_busy)

    def _open_gate(self, texts, is_time):
        disk = self._checkpoint_dir.disk
        if is_time and isinstance(disk, GatedDisk):
            disk.gate.set()
        return texts


def train(config, directory, faults=(), *, start=None, disk=None, stop_at=None):
    grid = build_grid(config)

    def prepare(rank, phase_hook):
        runtime = tiny_runs.prepare(config, grid, rank, hooks=fault_hooks(phase_hook, config))
        if start is not None:
            resume(runtime, Path(start), TEXT)
        return runtime

    def save(runtime):
        return WatchedSaver(runtime, CheckpointDirectory(directory, disk), TEXT)

    return run_elastic_in_threads(config, prepare, faults, save=save, stop_at=stop_at)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Trains a configuration in a folder of its own, once for all tests; returns the run and the folder."""
    known = {}

    def trained(config):
        key = config.model_dump_json()
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[key] = train(config, folder), folder
        return known[key]

    return trained


def assert_goes_on(done, whole, *, steps=range(4, 7)):
    """The steps, the evaluation and the weights are those of the run that was never interrupted."""
    assert sorted(done.steps) == list(steps)
    for step in steps:
        for name in ("loss", "grad_norm", "lr", "tokens", "num_updates", *MONITORED):
            assert done.steps[step].get(name) == whole.steps[step].get(name), f"{name} of step {step}"
    assert done.run.evaluation == whole.run.evaluation
    assert_equal(done.run.weights, whole.run.weights)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "layout, policy, model",
    [
        ("cube", "fp32", {}),
        ("pp2-dp2", "bf16_sr", {}),
        ("pp2-dp2", "bf16", dict(architecture="gpt2", tie_word_embeddings=True)),
        ("pp2-dp2", "fp16", {}),
        ("dp3-zero0", "fp32", {}),
        ("pp2-interleaved", "fp32", dict(tie_word_embeddings=True)),
        ("stages-2-1", "fp32", dict(tie_word_embeddings=True)),
        ("one", "fp32", {}),
    ],
)
def test_the_same_layout_goes_on_bitwise(tmp_path, undisturbed, layout, policy, model):
    config = config_of(layout, policy=policy, model=model)
    whole, folder = undisturbed(config)
    again = train(config, tmp_path, start=folder / "step-00000003")
    assert_goes_on(again, whole)
    assert_equal(read_all(tmp_path / "step-00000006"), read_all(folder / "step-00000006"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("there", ["pp2-dp2", "dp3-zero0", "one", "pp2-interleaved", "stages-2-1"])
def test_exact_sums_go_on_bitwise_on_any_layout(tmp_path, undisturbed, there):
    """At equal tensor-parallel size."""
    whole, folder = undisturbed(config_of("pp2-dp3", sums="exact"))
    moved = train(config_of(there, sums="exact"), tmp_path, start=folder / "step-00000003")
    assert_goes_on(moved, whole)


@pytest.mark.sample(1)
@pytest.mark.parametrize("there", ["pp2-dp2", "one", "dp3-zero0"])
def test_another_layout_goes_on_within_tolerance(tmp_path, undisturbed, there):
    whole, folder = undisturbed(config_of("cube", policy="fp64"))
    moved = train(config_of(there, policy="fp64"), tmp_path, start=folder / "step-00000003")
    for step in range(4, 7):
        assert moved.steps[step]["loss"] == pytest.approx(whole.steps[step]["loss"], rel=1e-10)
    for name, weight in whole.run.weights.items():
        torch.testing.assert_close(moved.run.weights[name], weight, rtol=1e-8, atol=1e-10)


def test_saving_changes_no_bit(tmp_path, undisturbed):
    with_saves, _ = undisturbed(config_of("cube"))
    without = train(config_of("cube", every=None, save_at_end=False), tmp_path / "none")
    assert_goes_on(with_saves, without, steps=range(1, 7))
    assert not (tmp_path / "none").exists()


def test_a_stop_saves_and_the_run_goes_on_from_there(tmp_path, undisturbed):
    config = config_of("pp2-dp2", every=None)
    whole, _ = undisturbed(config)
    stopped = train(config, tmp_path / "run", stop_at=2)
    assert sorted(stopped.steps) == [1, 2] and CheckpointDirectory(tmp_path / "run").steps() == [2]
    rest = train(config, tmp_path / "run", start=tmp_path / "run" / "latest")
    assert_goes_on(rest, whole, steps=range(3, 7))
    assert CheckpointDirectory(tmp_path / "run").steps() == [2, 6]


def test_what_is_to_be_kept_for_ever_is_saved_too(tmp_path):
    for every, keep_every, due in ((4, 6, [4, 6, 8, 12]), (None, 6, [6, 12]), (4, None, [4, 8, 12]), (None, None, [])):
        config = config_of("one", every=every, keep_every=keep_every)
        saver = AsyncSaver(run_layout(config)[2][0], CheckpointDirectory(tmp_path), TEXT)
        assert [step for step in range(1, 13) if saver.is_due(step, is_last=False)] == due


def test_a_finished_run_goes_no_further(tmp_path):
    config = config_of("pp2-dp2")
    train(config, tmp_path)
    before = (tmp_path / "latest" / "index.json").read_bytes()
    assert train(config, tmp_path, start=tmp_path / "latest").steps == {}
    assert (tmp_path / "latest" / "index.json").read_bytes() == before


def test_permanent_checkpoints_keep_their_weights_alone(tmp_path):
    """A real run's weights are read on any layout and refused only by a run that would resume."""
    config = config_of("pp2-dp2", every=None)
    lean = dict(keep_last=1, keep_every=2, keep_every_weights_only=True)
    for name, changes in (("lean", lean), ("whole", {})):
        changed = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=changes)})
        for step in (2, 4, 6):
            train(changed, tmp_path / name, start=tmp_path / name / "latest" if step > 2 else None, stop_at=step)
    found = {step: verify_checkpoint(CheckpointDirectory(tmp_path / "lean").path_of(step)) for step in (2, 4, 6)}
    best = os.readlink(tmp_path / "lean" / "best")
    permanent = [step for step in (2, 4) if not best.endswith(str(step))]
    assert [step for step, index in found.items() if not index.has_optimizer_state] == permanent
    for step in permanent:
        weights, whole = (read_all(CheckpointDirectory(tmp_path / name).path_of(step)) for name in ("lean", "whole"))
        assert_equal(weights, {key: value for key, value in whole.items() if key[0] == "weight"})
        assert (
            0.3
            < found[step].num_bytes / verify_checkpoint(CheckpointDirectory(tmp_path / "whole").path_of(step)).num_bytes
            < 0.4
        )


# --- deaths -----------------------------------------------------------------------------------------------------------


class GatedDisk(Disk):
    """Nothing of `step` gets on disk before the gate is open."""

    def __init__(self, step):
        self.gate = threading.Event()
        self._name = f"step-{step:08}"

    def make_folder(self, path):
        if self._name in path.name:
            assert self.gate.wait(60.0)
        super().make_folder(path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["forward", "backup", "all_reduce", "update", "all_gather"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_death_while_a_save_is_written(tmp_path, undisturbed, rank, phase):
    """The save is abandoned, and restarted if the run is still at that step; the run is the undisturbed one."""
    config = config_of("pp2-dp3", sums="exact", every=2)
    whole, folder = undisturbed(config)
    done = train(config, tmp_path, [kill_fault(rank, phase, 3)], disk=GatedDisk(2))
    assert done.num_changes == 1 and done.dead == (rank,)
    assert_goes_on(done, whole, steps=range(1, 7))
    assert "the checkpoint of step 2 is abandoned: the workers have changed meanwhile" in done.notices
    steps = CheckpointDirectory(tmp_path).steps()
    assert 6 in steps
    # whether another rank holds entry 3 is open while it is agreed on, or if the root of the tree dies right after
    is_open = phase == "all_reduce" or (rank == 0 and phase in ("update", "all_gather"))
    assert is_open or (2 in steps) == (phase in ("forward", "backup"))
    assert_equal(read_all(tmp_path / "latest"), read_all(folder / "latest"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["update", "all_gather", "evaluate"])
def test_a_death_after_the_step_that_is_saved(tmp_path, phase):
    """Some ranks have taken their snapshot, others have not: all start the save again."""
    config = config_of("pp2-dp3", sums="exact", every=2, num_steps=4)
    done = train(config, tmp_path, [kill_fault(4, phase, 2)])
    assert done.num_changes == 1
    assert CheckpointDirectory(tmp_path).find_newest_valid().index.step == 4
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".partial", ".removed"))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", ["update", "all_gather", "evaluate"])
def test_a_death_after_the_last_step(tmp_path, undisturbed, phase):
    config = config_of("pp2-dp3", sums="exact", every=None)
    _, folder = undisturbed(config)
    done = train(config, tmp_path, [kill_fault(1, phase, 6)])
    assert done.num_changes == 1
    assert_equal(read_all(tmp_path / "latest"), read_all(folder / "latest"))


def test_a_resumed_run_survives_a_death(tmp_path, undisturbed):
    config = config_of("pp2-dp3", sums="exact")
    whole, folder = undisturbed(config)
    for phase, step in [("forward", 4), ("recovery_moves", 4), ("update", 5)]:
        start = folder / "step-00000003"
        faults = (
            [kill_fault(0, "forward", 4), kill_fault(4, phase, step)]
            if phase != "forward"
            else [kill_fault(0, phase, step)]
        )
        done = train(config, tmp_path / phase, faults, start=start)
        assert_goes_on(done, whole)


# --- bad disks --------------------------------------------------------------------------------------------------------


class BadDisk(Disk):
    """`operation` fails for whatever belongs to `step`."""

    def __init__(self, step, operation, number):
        self._name, self._operation, self._number = f"step-{step:08}", operation, number

    def _fail(self, operation, path):
        if operation == self._operation and self._name in str(path):
            raise OSError(self._number, os.strerror(self._number), str(path))

    def make_folder(self, path):
        self._fail("make_folder", path)
        super().make_folder(path)

    def sync_folder(self, path):
        self._fail("sync_folder", path)
        super().sync_folder(path)

    def rename(self, path, target):
        self._fail("rename", path)
        super().rename(path, target)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "operation, words", [("make_folder", "can't write its part"), ("rename", "can't be published")]
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_costs_one_checkpoint(tmp_path, undisturbed, operation, words, number):
    config = config_of("pp2-dp2", every=3)
    whole, _ = undisturbed(config)
    done = train(config, tmp_path, disk=BadDisk(3, operation, number))
    assert_goes_on(done, whole, steps=range(1, 7))
    assert any("step 3 is abandoned" in text and words in text and os.strerror(number) in text for text in done.notices)
    found = CheckpointDirectory(tmp_path).find_newest_valid()
    assert found.index.step == 6 and not found.damaged and 3 not in CheckpointDirectory(tmp_path).steps()


class FullDisk(BadDisk):
    """A disk that is full until `times` operations have failed."""

    def __init__(self, step, operation, times):
        super().__init__(step, operation, errno.ENOSPC)
        self.left, self._lock = times, threading.Lock()

    def _fail(self, operation, path):
        with self._lock:
            is_hit = operation == self._operation and self._name in str(path) and self.left > 0
            self.left -= 1 if is_hit else 0
        if is_hit:
            super()._fail(operation, path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("operation, times", [("make_folder", 1), ("make_folder", 8), ("rename", 2)])
def test_the_last_save_is_tried_again(tmp_path, operation, times):
    """A part that can't be written, on one rank or on all, or a checkpoint that can't be published; then it can."""
    disk = FullDisk(6, operation, times)
    done = train(config_of("pp2-dp2", retry_s=[0.01, 0.02, 0.03]), tmp_path, disk=disk)
    assert disk.left == 0 and CheckpointDirectory(tmp_path).find_newest_valid().index.step == 6
    told = [text for text in done.notices if "the last, is not on disk" in text]
    assert told == [f"step 6, the last, is not on disk: trying again in {s:g} s" for s in (0.01, 0.02)[: len(told)]]
    assert len(told) == (1 if times == 1 else 2) and not any("no checkpoint" in text for text in done.notices)


def test_a_last_save_that_never_succeeds_is_told(tmp_path):
    disk = BadDisk(6, "make_folder", errno.EROFS)
    done = train(config_of("pp2-dp2", retry_s=[0.01]), tmp_path, disk=disk)
    assert done.notices.count("warning: the last step, 6, has no checkpoint") == 1
    assert sum("trying again" in text for text in done.notices) == 1
    assert CheckpointDirectory(tmp_path).find_newest_valid().index.step == 3


def test_a_stop_does_not_wait_for_room(tmp_path):
    disk = FullDisk(4, "make_folder", 1)
    config = config_of("pp2-dp2", every=3, retry_s=[600.0])
    train(config, tmp_path, disk=disk, stop_at=4)
    assert disk.left == 0 and CheckpointDirectory(tmp_path).find_newest_valid().index.step == 4


def test_a_second_save_is_skipped_while_the_first_is_written(tmp_path):
    done = train(config_of("pp2-dp2", every=2), tmp_path, disk=GatedDisk(2))
    assert "no checkpoint of step 4: that of step 2 is still being written" in done.notices
    assert CheckpointDirectory(tmp_path).steps() == [2, 6]
