"""The compiled loops have the bits of their definitions; without a compiler torch takes their place."""

import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d import compiled_loops
from parallel3d.precision.stochastic_rounding import noise_of, round_by_words, round_to_bf16
from parallel3d.random_keys import Key, bits, bits_by_operators, key_of

WORD = st.integers(-(2**63), 2**63 - 1)
PATTERNS = [0, 1, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF, 0x007FFFFF, 0x3F80FFFF]
HAS_COMPILER = compiled_loops.loop_library(compiled_loops._RANDOM_BITS) is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")


def fresh_library(source=compiled_loops._RANDOM_BITS, load=compiled_loops.loop_library.__wrapped__):
    """As in a process that has not called it."""
    return load(source)


@needs_compiler
@given(st.lists(WORD, min_size=1, max_size=70), WORD, WORD)
def test_words(index, first, second):
    key, index = Key(first, second), torch.tensor(index)
    assert torch.equal(bits(key, index), bits_by_operators(key, index))


@needs_compiler
def test_words_of_any_shape_and_stride():
    key, index = key_of("a test"), torch.arange(60).view(6, 10)
    for part in (index, index.t(), index[:, ::3], index[:0], index[0, 0], torch.arange(5).expand(3, 5)):
        assert torch.equal(bits(key, part), bits_by_operators(key, part))


@needs_compiler
@pytest.mark.parametrize("part", range(4))
def test_rounding_of_every_kind_of_number(part):
    """Both signs of infinities, NaNs, the largest and the smallest numbers, with the smallest and the largest noise."""
    signed = [pattern - 2**31 * negative for pattern in PATTERNS for negative in (0, 1)]
    numbers = torch.Generator().manual_seed(part)
    drawn = torch.randint(-(2**31), 2**31, (5000,), generator=numbers, dtype=torch.int64).to(torch.int32)
    values = torch.cat([torch.tensor(signed, dtype=torch.int32).repeat(2), drawn]).view(torch.float32)
    words = bits(key_of("a test"), torch.arange(len(values)))
    words[: len(signed)], words[len(signed) : 2 * len(signed)] = 0, -1
    expected = round_to_bf16(values, noise_of(words, part))
    assert torch.equal(round_by_words(values, words, part).view(torch.int16), expected.view(torch.int16))
    out = torch.empty(len(values), 2, dtype=torch.bfloat16)[:, 0]  # not contiguous: by operators
    assert round_by_words(values, words, part, out=out) is out
    assert torch.equal(out.clone().view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("failure", [OSError("no cc"), subprocess.CalledProcessError(1, "cc")], ids=str)
def test_without_a_compiler(failure, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(compiled_loops, "loop_library", fresh_library)
    index = torch.arange(100)
    assert fresh_library() is None and not list(tmp_path.rglob("*.so"))
    assert torch.equal(bits(key_of("w"), index), bits_by_operators(key_of("w"), index))


@needs_compiler
def test_the_library_is_kept_where_the_home_can_be_written_to(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert fresh_library() is not None
    (kept,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.setattr(subprocess, "run", None)  # the second process compiles nothing
    assert fresh_library() is not None and kept.suffix == ".so"
    monkeypatch.undo()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "a file")
    (tmp_path / "a file").touch()
    assert fresh_library() is not None
