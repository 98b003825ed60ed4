"""Which changes of a text are noticed."""

import pytest

from parallel3d.data import fingerprint as module
from parallel3d.data.fingerprint import file_digest_of


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 4)
    monkeypatch.setattr(module, "NUM_BLOCKS", 8)


def hash_of(tmp_path, content, name="a"):
    path = tmp_path / name
    path.write_bytes(content)
    return file_digest_of(path)


@pytest.mark.parametrize("size", [0, 1, 32])
def test_of_a_small_file_every_byte_counts(tmp_path, small_blocks, size):
    content = bytes(range(size))
    first = hash_of(tmp_path, content)
    assert hash_of(tmp_path, content, "b") == first
    for at in range(size):
        assert hash_of(tmp_path, content[:at] + b"\xff" + content[at + 1 :]) != first
    assert hash_of(tmp_path, content + b"\0") != first


def test_of_a_large_file_blocks_from_its_first_byte_to_its_last_count(tmp_path, small_blocks):
    content = bytes(range(200))
    first = hash_of(tmp_path, content)
    assert hash_of(tmp_path, content, "b") == first
    noticed = [at for at in range(200) if hash_of(tmp_path, content[:at] + b"\xff" + content[at + 1 :]) != first]
    assert noticed == [at for number in range(8) for at in range(196 * number // 7, 196 * number // 7 + 4)]
    assert {0, 199} < set(noticed)
    assert hash_of(tmp_path, content[:100] + content[101:]) != first  # its size
