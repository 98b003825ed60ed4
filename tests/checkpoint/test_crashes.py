"""A save ends at any of its file operations, by a death or by a full disk: what was published stays, nothing is in the
way of the next save."""

import errno
import os
import shutil
from contextlib import suppress

import pytest

from parallel3d.checkpoint import drop_optimizer_state
from parallel3d.checkpoint.directory import CheckpointDirectory, verify_checkpoint, verify_resumable
from parallel3d.checkpoint.disk import Disk
from parallel3d.errors import CheckpointError
from tests.support.small_checkpoints import assert_is, assert_weights, save

OPERATIONS = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "link", "remove_file", "remove_folder")


class Killed(BaseException):
    """The process is gone."""


class FailingDisk(Disk):
    """Every operation from the `last`-th on raises; a write has got half of its data out by then."""

    def __init__(self, last: int, error: BaseException):
        self.names: list[str] = []
        self._last, self._error = last, error

    def count(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) >= self._last:
            raise self._error

    def write(self, file, data):
        try:
            self.count("write")
        except BaseException:
            super().write(file, memoryview(data)[: len(data) // 2])
            raise
        super().write(file, data)


def counted(name):
    def method(self, *arguments):
        self.count(name)
        return getattr(Disk, name)(self, *arguments)

    return method


for name in OPERATIONS:
    if name != "write":
        setattr(FailingDisk, name, counted(name))


def history(directory):
    """Two published checkpoints, of which the third save removes one; one of the same step as the third is there."""
    save(directory, 1, evaluation_loss=2.0)
    save(directory, 2, evaluation_loss=1.0)


def operations_of_a_save(tmp_path):
    history(tmp_path)
    disk = FailingDisk(10**9, Killed())
    save(tmp_path, 3, disk=disk, evaluation_loss=0.5)
    return disk.names


def test_every_operation_is_counted(tmp_path):
    """A method that changes files and is not in the list would not be tested."""
    names = operations_of_a_save(tmp_path)
    assert set(names) == set(OPERATIONS)
    changing = {name for name in vars(Disk) if not name.startswith("_")} - {"remove_tree", "write_file"}
    assert changing == set(OPERATIONS)


NUM_OPERATIONS = 70


@pytest.mark.sample(24)
@pytest.mark.parametrize("last", range(1, NUM_OPERATIONS))
def test_killed_at_any_operation(tmp_path, last):
    history(tmp_path)
    killed = False
    try:
        save(tmp_path, 3, disk=FailingDisk(last, Killed()), evaluation_loss=0.5)
    except Killed:
        killed = True
    checkpoint_dir = CheckpointDirectory(tmp_path)
    found = checkpoint_dir.find_newest_valid()
    assert not found.damaged  # a name that can be seen is that of a whole checkpoint
    assert_is(found, 3 if checkpoint_dir.path_of(3).exists() else 2)
    assert checkpoint_dir.path_of(3).exists() or killed
    assert (tmp_path / "latest" / "index.json").exists()
    save(tmp_path, 4, evaluation_loss=0.7)
    assert_is(checkpoint_dir.find_newest_valid(), 4)
    names = sorted(os.listdir(tmp_path))
    assert [name for name in names if "." in name] == []
    assert os.readlink(tmp_path / "latest") == "step-00000004"


def test_all_operations_were_among_these(tmp_path):
    assert len(operations_of_a_save(tmp_path)) < NUM_OPERATIONS


@pytest.mark.sample(8)
@pytest.mark.parametrize("last", range(1, NUM_OPERATIONS, 3))
def test_killed_while_a_step_is_saved_again(tmp_path, last):
    """After a loss at the run's end its last step is saved again; the one before it stays in any case."""
    history(tmp_path)
    save(tmp_path, 3)
    with suppress(Killed):
        save(tmp_path, 3, generation=1, disk=FailingDisk(last, Killed()))
    found = CheckpointDirectory(tmp_path).find_newest_valid()
    assert not found.damaged
    assert_is(found, 3 if CheckpointDirectory(tmp_path).path_of(3).exists() else 2)
    save(tmp_path, 4)
    assert [name for name in sorted(os.listdir(tmp_path)) if "." in name] == []


@pytest.mark.each_value
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("last", range(1, NUM_OPERATIONS, 4))
def test_a_failing_disk_leaves_the_checkpoint_before(tmp_path, last, number):
    history(tmp_path)
    with suppress(OSError):
        save(tmp_path, 3, disk=FailingDisk(last, OSError(number, os.strerror(number))))
    found = CheckpointDirectory(tmp_path).find_newest_valid()
    assert not found.damaged and found.index.step in (2, 3)
    save(tmp_path, 4)
    assert_is(CheckpointDirectory(tmp_path).find_newest_valid(), 4)


def test_a_folder_that_has_vanished_comes_back(tmp_path):
    directory = tmp_path / "checkpoints"
    save(directory, 1)
    shutil.rmtree(directory)
    save(directory, 2)
    assert_is(CheckpointDirectory(directory).find_newest_valid(), 2)


# --- weights alone ----------------------------------------------------------------------------------------------------


def longer_history(directory, disk=None):
    """With the third save the first checkpoint, kept for ever, is to lose its moments."""
    for step, loss in ((1, 2.0), (2, 1.0)):
        save(directory, step, evaluation_loss=loss, keep_every=1, weights_only=True)
    save(directory, 3, disk=disk, evaluation_loss=0.5, keep_every=1, weights_only=True)


NUM_STRIP_OPERATIONS = 65


@pytest.mark.sample(9)
@pytest.mark.parametrize("last", range(40, NUM_STRIP_OPERATIONS))
def test_killed_while_moments_are_dropped(tmp_path, last):
    """The checkpoint is whole or of weights alone, and valid in either case; the next save finishes the work."""
    with suppress(Killed):
        longer_history(tmp_path, FailingDisk(last, Killed()))
    checkpoint_dir = CheckpointDirectory(tmp_path)
    for step in checkpoint_dir.steps():
        assert_weights(checkpoint_dir.path_of(step), step)
    assert checkpoint_dir.steps()[:2] == [1, 2]
    save(tmp_path, 4, evaluation_loss=0.7, keep_every=1, weights_only=True)
    steps = checkpoint_dir.steps()
    for step in steps:
        index = assert_weights(checkpoint_dir.path_of(step), step)
        assert index.has_optimizer_state == (step in steps[-2:])
        listed = {"index.json", *(file.name for file in index.files)}
        assert {path.name for path in checkpoint_dir.path_of(step).iterdir()} == listed


def test_all_operations_of_dropping_moments_were_among_these(tmp_path):
    disk = FailingDisk(10**9, Killed())
    longer_history(tmp_path, disk)
    assert len(disk.names) < NUM_STRIP_OPERATIONS
    assert [size < 0.7 for size in sizes(tmp_path)] == [True, False, False]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64])
def test_weights_that_lie_across_chunks(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(drop_optimizer_state, "WRITE_BYTES", chunk_bytes)
    longer_history(tmp_path)
    assert not assert_weights(tmp_path / "step-00000001", 1).has_optimizer_state


def sizes(directory):
    """Bytes of the checkpoints, beside those of the newest."""
    checkpoint_dir = CheckpointDirectory(directory)
    found = [verify_checkpoint(checkpoint_dir.path_of(step)).num_bytes for step in checkpoint_dir.steps()]
    return [size / found[-1] for size in found]


def test_a_damaged_one_keeps_its_moments_and_is_named(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, keep_every=1, weights_only=True)
    shard = tmp_path / "step-00000001" / "rank-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + b"x")  # among the moments
    with pytest.raises(CheckpointError, match="rank-00001.safetensors is damaged"):
        save(tmp_path, 3, keep_every=1, weights_only=True)
    shard.write_bytes(data)
    assert verify_checkpoint(tmp_path / "step-00000001").has_optimizer_state
    assert_is(CheckpointDirectory(tmp_path).find_newest_valid(), 3)


def test_no_run_goes_on_from_weights_alone(tmp_path):
    longer_history(tmp_path)
    for step in (2, 3):
        os.remove(tmp_path / f"step-0000000{step}" / "rank-00000.safetensors")
    found = CheckpointDirectory(tmp_path).find_newest_valid()
    assert found.path is None and "step-00000001 holds weights only" in found.damaged[-1]
    with pytest.raises(CheckpointError, match="step-00000001 holds weights only"):
        verify_resumable(tmp_path / "step-00000001")
