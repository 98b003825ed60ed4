"""Formats of the user's own: a function in the current folder, or an entry point, whose documents a run reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.load import load_config
from parallel3d.data.corpus import Corpus
from parallel3d.data.run_data import build_reader, open_run_corpus
from parallel3d.errors import ConfigError, DataError, UserCodeError
from parallel3d.parallel.abort import AbortToken
from tests.support import tiny_runs
from tests.support.chats import records

ROOT = Path(__file__).parents[2]
MINE = """
    def read(path):
        for entry in path.read_text().split("---"):
            yield entry.strip()

    def shout(path):
        return [entry.upper() for entry in read(path)]

    def chats(path):
        import json
        yield from json.loads(path.read_text())["chats"]

    def fails(path):
        yield "good"
        yield path.no_such_method()

    def numbers(path):
        yield from ["good", 2]

    def surrogate(path):
        yield "\\ud800"

    def whole(path):
        return path.read_text()

    def objects(path):
        yield {"messages": object()}
"""
ENTRIES = [f"entry {number} of the log, größe" for number in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a user's functions and files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.log").write_text("\n---\n".join([*ENTRIES, ""]))
    (tmp_path / "texts" / "b.txt").write_text("plain text\n")
    return tmp_path


def open_own(folder: Path, formats: dict[str, str], sources: str = "texts", **data: Any) -> Corpus:
    settings = dict(tokenizer=dict(kind="bytes"), cache_directory=str(folder / "cache"), validation_fraction=0.0)
    both = dict(sources=[sources], formats=formats)
    config = tiny_runs.make_config(
        data={**settings, **both, **data}, batch=dict(global_batch_size=2, sequence_length=16)
    )
    corpus = open_run_corpus(config, AbortToken(), lambda text: None)
    assert build_reader(config, corpus).read(1, (0, 0, 0), 16)[0].size == 17
    return corpus


def texts_of(corpus: Corpus) -> list[str]:
    documents: Any = corpus.train
    return [documents.documents.read(index) for index in range(len(documents))]


def test_a_function_reads_the_files_of_its_suffix(folder: Path) -> None:
    assert texts_of(open_own(folder, {".log": "mine.py:read"})) == [*ENTRIES, "plain text\n"]
    (folder / "texts" / "c.loud.log").write_text("more")
    loud = open_own(folder, {".log": "mine.py:read", ".loud.log": "mine.py:shout"})
    assert texts_of(loud) == [*ENTRIES, "plain text\n", "MORE"]
    (folder / "texts" / "d.txt").write_text("ours --- is overruled")
    assert texts_of(open_own(folder, {".txt": "mine.py:shout"})) == ["PLAIN TEXT", "OURS", "IS OVERRULED"]


def test_a_change_of_the_function_is_read_again(folder: Path) -> None:
    before = open_own(folder, {".log": "mine.py:read"}, "texts/a.log")
    (folder / "other.py").write_text("def read(path):\n    yield from ['one', 'two']\n")
    code = (folder / "other.py").read_text()
    assert texts_of(open_own(folder, {".log": "other.py:read"}, "texts/a.log")) == ["one", "two"]
    assert open_own(folder, {".log": "other.py:read"}, "texts/a.log").folder != before.folder
    (folder / "other.py").write_text(code.replace("two", "three"))
    for name in [name for name in sys.modules if name.startswith("user_file_other")]:
        del sys.modules[name]  # as in the next start of a run
    assert texts_of(open_own(folder, {".log": "other.py:read"}, "texts/a.log")) == ["one", "three"]


def test_it_yields_conversations_with_a_template(folder: Path) -> None:
    (folder / "all.chats").write_text(json.dumps({"chats": records(60)}))
    (folder / "all.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records(60)))
    chat = dict(chat={}, document_mask=True)
    ours = open_own(folder, {".chats": "mine.py:chats"}, "all.chats", **chat)
    assert ours.fingerprint == open_own(folder, {}, "all.jsonl", **chat).fingerprint
    with pytest.raises(DataError, match=r"a\.log, document 1 of mine\.py:read: a conversation must be a JSON object"):
        open_own(folder, {".log": "mine.py:read"}, "texts/a.log", **chat)
    with pytest.raises(DataError, match=r"document 1 of mine\.py:objects: can't be JSON \(Object of type object"):
        open_own(folder, {".log": "mine.py:objects"}, "texts/a.log", **chat)


@pytest.mark.parametrize(
    "function, kind, expected",
    [
        (
            "fails",
            UserCodeError,
            r"data\.formats mine\.py:fails, on .*a\.log: .*mine\.py, line 15, in fails .*no_such_meth",
        ),
        ("numbers", DataError, r"a\.log, document 2 of mine\.py:numbers: is of type int, not text"),
        ("surrogate", DataError, r"document 1 of mine\.py:surrogate: not valid UTF-8"),
        ("whole", DataError, r"mine\.py:whole: returned str: it must yield documents"),
        ("missing", ConfigError, r"data\.formats = 'mine\.py:missing': AttributeError"),
    ],
)
def test_what_goes_wrong_is_named(folder: Path, function: str, kind: type[Exception], expected: str) -> None:
    with pytest.raises(kind, match=expected):
        open_own(folder, {".log": f"mine.py:{function}"})


def test_a_name_without_a_dot(folder: Path) -> None:
    (folder / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.formats\.log.*should match pattern '\^\\\.'"):
        load_config("a.json", ['data.formats={"log": "mine.py:read"}'])


@pytest.mark.slow
def test_an_entry_point_names_one(folder: Path) -> None:
    """A format, and a source, of an installed package; no other process than that of the run needs it."""
    info = folder / "site" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = {"formats": "logs = packaged_logs:read", "sources": "notes = packaged_logs:notes"}
    lines = [f"[parallel3d.{group}]\n{entry}\n" for group, entry in groups.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    notes = "def notes():\n    return ['one note', 'another note']\n"
    (folder / "site" / "packaged_logs.py").write_text((folder / "mine.py").read_text() + notes)
    script = (
        "from pathlib import Path\n"
        "from tests.data.test_own_format import open_own, texts_of\n"
        "print(*texts_of(open_own(Path('.').resolve(), {'.log': 'logs'}, 'texts/a.log')), sep='\\n')\n"
        "print(*texts_of(open_own(Path('.').resolve(), {}, 'notes')), sep='\\n')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site")])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == [*ENTRIES, "one note", "another note"], done.stderr
