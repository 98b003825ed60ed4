"""Which checkpoints are there, which are kept, which is found when some are damaged."""

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.checkpoint.directory import (
    CheckpointDirectory,
    best_of,
    plan_pruning,
    read_index,
    verify_checkpoint,
)
from parallel3d.checkpoint.disk import Disk
from parallel3d.checkpoint.drop_optimizer_state import drop_optimizer_state
from parallel3d.errors import CheckpointError
from tests.support.small_checkpoints import assert_is, save


def steps_in(directory):
    return CheckpointDirectory(directory).steps()


def test_the_last_ones_the_best_and_the_permanent_ones_are_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5, 5: 1.6, 6: 1.7, 7: 1.8}
    for step, loss in losses.items():
        save(tmp_path, step, keep_every=4, evaluation_loss=loss)
    assert steps_in(tmp_path) == [2, 4, 6, 7]
    assert os.readlink(tmp_path / "latest") == "step-00000007" and os.readlink(tmp_path / "best") == "step-00000002"


def test_best_compares_like_with_like():
    assert best_of(iter([(1, None, 1.0), (2, 3.0, 0.5), (3, 2.0, 0.9)])) == 3
    assert best_of(iter([(1, None, 1.0), (2, None, 0.5)])) == 2
    assert best_of(iter([(1, None, None), (2, float("nan"), None)])) is None


@given(st.sets(st.integers(1, 60)), st.integers(1, 5), st.none() | st.integers(1, 7))
def test_the_newest_the_best_and_the_permanent_are_never_superfluous(steps, keep_last, keep_every):
    ordered = sorted(steps)
    best = ordered[0] if ordered else None
    gone, permanent = plan_pruning(ordered, keep_last=keep_last, keep_every=keep_every, best=best)
    kept = {*ordered[-keep_last:], *ordered[:1]}
    assert not kept & {*gone, *permanent} and sorted(kept | {*gone, *permanent}) == ordered
    assert [keep_every is not None and step % keep_every == 0 for step in sorted(gone + permanent)] == [
        step in permanent for step in sorted(gone + permanent)
    ]


def test_leftovers_of_a_run_that_goes_on_without_this_process_stay(tmp_path):
    """A leader that was frozen, and evicted, as it began a save: it must not remove what the others write now. Those of
    earlier runs, in whatever generation, were there when it started."""
    directory = CheckpointDirectory(tmp_path)
    (tmp_path / "step-00000002.e9.partial").mkdir(parents=True)
    old = directory.leftovers()
    names = ("step-00000004.e1.partial", "step-00000006.e2.partial", "step-00000006.e3.partial")
    for name in (*names, "step-00000001.0.removed"):
        (tmp_path / name).mkdir()
    directory.remove_leftovers(keep=directory.partial_path(6, 2), old=old)
    assert directory.leftovers() == {"step-00000006.e2.partial", "step-00000006.e3.partial"}


def test_a_damaged_one_is_named_and_the_one_before_is_taken(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep_last=3)
    flip(tmp_path / "step-00000003" / "rank-00001.safetensors", -1)
    os.remove(tmp_path / "step-00000002" / "rank-00000.safetensors")
    found = CheckpointDirectory(tmp_path).find_newest_valid()
    assert_is(found, 1)
    assert "step-00000003/rank-00001.safetensors is damaged" in found.damaged[0]
    assert "step-00000002/rank-00000.safetensors can't be read" in found.damaged[1]


def test_nothing_there(tmp_path):
    found = CheckpointDirectory(tmp_path / "nowhere").find_newest_valid()
    assert found.path is None and not found.damaged
    assert CheckpointDirectory(tmp_path / "nowhere").archive_later(after=0) is None


def test_later_steps_are_set_aside_not_lost(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep_last=3)
    aside = CheckpointDirectory(tmp_path).archive_later(after=1)
    assert steps_in(tmp_path) == [1] and steps_in(aside) == [2, 3]
    assert os.readlink(tmp_path / "latest") == "step-00000001"
    assert_is(CheckpointDirectory(aside).find_newest_valid(), 3)
    assert CheckpointDirectory(tmp_path).archive_later(after=0).name == "previous-2"
    assert not (tmp_path / "latest").is_symlink()
    assert CheckpointDirectory(tmp_path).archived_bytes() == sum(
        path.stat().st_size for path in tmp_path.rglob("previous-*/*/*") if path.is_file()
    )


def flip(path, offset, bits=0x55):
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(data)


def test_any_changed_byte_is_found_and_its_file_named(tmp_path):
    """Bytes changed, cut off or added, in the index and in the shards: an error, or what was written; never else."""
    good = save(tmp_path / "good", 1)
    numbers = random.Random(0)
    names = sorted(path.name for path in good.iterdir())
    assert len(names) == 4
    for _ in range(300):
        name = numbers.choice(names)
        copy = tmp_path / "copy"
        shutil.copytree(good, copy)
        path = copy / name
        size = path.stat().st_size
        kind = numbers.choice(("flip", "flip", "flip", "cut", "add", "swap"))
        if kind == "flip":
            flip(path, numbers.randrange(size), 1 << numbers.randrange(8))
        elif kind == "cut":
            os.truncate(path, numbers.randrange(size))
        elif kind == "add":
            path.write_bytes(path.read_bytes() + numbers.randbytes(numbers.randint(1, 20)))
        else:
            path.write_bytes(numbers.randbytes(size))
        with pytest.raises(CheckpointError, match=name):
            verify_checkpoint(copy)
        shutil.rmtree(copy)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    """A file has taken its name: as with a folder of another user or a stale handle, listing fails."""
    folder = tmp_path / "checkpoints"
    folder.write_text("not a folder")
    directory = CheckpointDirectory(folder)
    for use in (directory.steps, directory.find_newest_valid):
        with pytest.raises(CheckpointError, match="cannot be listed .Not a directory.*checkpoint.directory"):
            use()


@pytest.mark.parametrize("header", [b"[" * 100_000, b"7", b"[]"])
def test_a_shard_whose_header_is_not_one_is_named(tmp_path: Path, header: bytes) -> None:
    save(tmp_path, 1)
    folder = CheckpointDirectory(tmp_path).path_of(1)
    shard = folder / "rank-00000.safetensors"
    shard.write_bytes(len(header).to_bytes(8, "little") + header)
    index = read_index(folder)
    files = tuple(f.model_copy(update={"size": 8 + len(header)}) if f.name == shard.name else f for f in index.files)
    with pytest.raises(CheckpointError, match=f"{shard} is damaged"):
        drop_optimizer_state(folder, index.model_copy(update={"files": files}), Disk())
