"""A checkpoint of weights alone appears whole or not at all, whatever interrupts it."""

import errno
import os
from contextlib import suppress

import pytest

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.index import RunFacts
from parallel3d.checkpoint.shard import StoredTensor, split_into_files
from parallel3d.checkpoint.weights import write_weights
from parallel3d.errors import CheckpointError
from tests.checkpoint.test_crashes import FailingDisk, Killed

NUM_OPERATIONS = 25


def write(target, disk=None):
    tensors = {"a.weight": ("F32", (3, 2)), "b.bias": ("BF16", (5,))}
    chunks = (memoryview(bytes(size)) for size in (24, 10))
    facts = RunFacts(state={}, config={})
    return write_weights(target, tensors, chunks, facts=facts, step=3, files={"tokenizer.model": b"pieces"}, disk=disk)


@pytest.mark.each_value
@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "full")], ids=["killed", "full"])
@pytest.mark.parametrize("last", range(1, NUM_OPERATIONS))
def test_ended_at_any_operation(tmp_path, last, error):
    target = tmp_path / "weights"
    with suppress(Killed, OSError):
        write(target, FailingDisk(last, error))
    if not target.exists():
        write(target)
    assert [file.name for file in verify_checkpoint(target).files] == ["weights.safetensors", "tokenizer.model"]
    assert os.listdir(tmp_path) == ["weights"]


def test_all_operations_were_among_these(tmp_path):
    disk = FailingDisk(10**9, Killed())
    write(tmp_path / "weights", disk)
    assert len(disk.names) < NUM_OPERATIONS


def test_nothing_is_overwritten(tmp_path):
    write(tmp_path / "weights")
    with pytest.raises(CheckpointError, match="weights exists: nothing is overwritten"):
        write(tmp_path / "weights")


def test_as_many_to_a_file_as_fit():
    tensors = [StoredTensor(key=str(size), format="F32", shape=(size,)) for size in (1, 2, 3, 9, 1, 1)]
    files = [[tensor.key for tensor in file] for file in split_into_files(tensors, 16)]
    assert files == [["1", "2"], ["3"], ["9"], ["1", "1"]]
