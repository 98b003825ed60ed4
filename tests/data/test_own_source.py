"""Sources of the user's own: an object that gives documents, by index or one after the other, which a run reads."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from parallel3d.config.load import load_config
from parallel3d.data.corpus import Corpus
from parallel3d.data.run_data import _open_reader, build_reader
from parallel3d.errors import ConfigError, DataError, UserCodeError
from tests.data.test_own_format import open_own, texts_of
from tests.support import tiny_runs

MINE = """
    TEXTS = [f"document {number} of a database, größe" for number in range(60)]

    class Table:
        def __len__(self):
            return len(TEXTS)

        def __getitem__(self, index):
            return TEXTS[index % len(TEXTS)]  # a list would end here, and this one does not

    table = Table()

    def rows():
        yield from TEXTS

    def fails():
        yield "good"
        yield TEXTS.no_such_method()

    def numbers():
        yield from ["good", 2]

    def count():
        return 3

    number = 7
"""
TEXTS = [f"document {number} of a database, größe" for number in range(60)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a user's objects."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.py").write_text(dedent(MINE))
    return tmp_path


def open_source(folder: Path, source: str, **data: Any) -> Corpus:
    return open_own(folder, {}, source, **data)


@pytest.mark.parametrize("name", ["Table", "table", "rows"])
def test_documents_by_index_or_in_order(folder: Path, name: str) -> None:
    assert texts_of(open_source(folder, f"base.py:{name}")) == TEXTS


def test_any_process_reads_on_from_a_cursor(folder: Path) -> None:
    """The cursor is plain integers; the documents are not asked for again."""
    settings = dict(tokenizer=dict(kind="bytes"), cache_directory=str(folder / "cache"), validation_fraction=0.0)
    config = tiny_runs.make_config(
        data={**settings, "sources": ["base.py:Table"]}, batch=dict(global_batch_size=2, sequence_length=16)
    )
    corpus = open_source(folder, "base.py:Table")
    ours, theirs = build_reader(config, corpus), _open_reader(config, corpus.folder)
    cursor = ours.start(1)
    for _ in range(3):
        _, cursor = ours.read(1, cursor, 16)
    assert all(type(number) is int for number in cursor)
    assert np.array_equal(theirs.read(1, cursor, 16)[0], ours.read(1, cursor, 16)[0])


def test_the_same_text_is_the_same_corpus(folder: Path) -> None:
    """Whatever gives it; a change of the code is read again."""
    assert open_source(folder, "base.py:Table").fingerprint == open_source(folder, "base.py:rows").fingerprint
    (folder / "other.py").write_text("def rows():\n    return ['one', 'two']\n")
    assert texts_of(open_source(folder, "other.py:rows")) == ["one", "two"]
    (folder / "other.py").write_text("def rows():\n    return ['one', 'three', 'four']\n")
    for name in [name for name in sys.modules if name.startswith("user_file_other")]:
        del sys.modules[name]  # as in the next start of a run
    assert texts_of(open_source(folder, "other.py:rows")) == ["one", "three", "four"]


@pytest.mark.parametrize(
    "name, kind, expected",
    [
        ("fails", UserCodeError, r"data\.sources base\.py:fails: .*base\.py, line 18, in fails .*no_such_method"),
        ("numbers", DataError, r"document 2 of base\.py:numbers: is of type int, not text"),
        ("count", DataError, r"base\.py:count: returned int: it must yield documents"),
        ("TEXTS", DataError, r"data\.sources base\.py:TEXTS is of type list: name a function or a class"),
        ("missing", ConfigError, r"data\.sources = 'base\.py:missing': AttributeError"),
    ],
)
def test_what_goes_wrong_is_named(folder: Path, name: str, kind: type[Exception], expected: str) -> None:
    with pytest.raises(kind, match=expected):
        open_source(folder, f"base.py:{name}")


def test_a_name_that_is_neither(folder: Path) -> None:
    (folder / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.sources\.0.*no such file or folder"):
        load_config("a.json", ['data.sources=["texts"]'])
