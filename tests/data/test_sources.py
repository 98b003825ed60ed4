"""Sources: which files, in which order, cut where; and the messages about bad ones."""

import json
import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.data import formats as module
from parallel3d.data.document_index import blocks
from parallel3d.data.formats import DocumentSet, PlainText, build_formats, cut_at_line_ends
from parallel3d.data.sources import find_files
from parallel3d.errors import DataError


def documents_of(sources, *, text_column="text", document_chars=0):
    return scan(find_files([str(source) for source in sources]), text_column, document_chars)


def scan(files, text_column="text", document_chars=0):
    formats = build_formats(text_column=text_column, document_chars=document_chars)
    rows = [(number, *row) for number, file in enumerate(files) for row in formats[file.format].scan(file.path)]
    return DocumentSet(files=files, formats=formats, document_index=next(blocks(rows)))


def texts(documents):
    return [documents.read(index) for index in range(len(documents))]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def test_a_folder_is_read_by_relative_name_and_sources_in_the_order_given(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c.jsonl", "ignored.bin"):
        write(tmp_path / "folder" / name, json.dumps({"text": name}) if name.endswith("jsonl") else name)
    first = write(tmp_path / "zz.md", "zz.md")
    assert texts(documents_of([first, tmp_path / "folder"])) == ["zz.md", "a.txt", "b/1.txt", "b/2.txt", "c.jsonl"]
    assert texts(documents_of([tmp_path / "folder" / "**" / "*.txt"])) == ["a.txt", "b/1.txt", "b/2.txt"]


def test_bytes_are_text_as_they_are(tmp_path):
    text = "\ufeffone\r\ntwo\rthree\n\n\tünïcödé 😀\n"
    assert texts(documents_of([write(tmp_path / "a.txt", text)])) == [text]


lines_of_text = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12)


@given(lines=st.lists(lines_of_text.map("{}\n".format), max_size=30), document_chars=st.integers(0, 40))
def test_documents_are_consecutive_whole_lines(lines, document_chars):
    data = "".join(lines).encode()
    document_index = list(cut_at_line_ends([(len(line.encode()), len(line)) for line in lines], document_chars))
    found = [data[offset : offset + size].decode() for offset, size in document_index]
    assert "".join(found) == "".join(lines)
    assert all(document.endswith("\n") for document in found)
    if document_chars == 0:
        assert len(found) == bool(lines)
    for document, following in zip(found, found[1:]):
        assert len(document) <= document_chars or document.count("\n") == 1
        assert len(document) + following.index("\n") + 1 > document_chars  # none is shorter than it has to be


def test_documents_are_no_longer_than_asked_for_and_a_short_tail_joins_the_last():
    assert list(cut_at_line_ends([(10, 10)] * 7, 30)) == [(0, 30), (30, 40)]
    assert list(cut_at_line_ends([(10, 10)] * 8, 30)) == [(0, 30), (30, 30), (60, 20)]
    assert list(cut_at_line_ends([(100, 100), (10, 10), (10, 10)], 30)) == [(0, 100), (100, 20)]


@given(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("é漢😀\n"), max_size=60),
    st.integers(1, 9),
    st.integers(0, 20),
)
def test_a_line_that_is_very_long_is_cut_between_characters(tmp_path_factory, text, limit, document_chars):
    """Whatever the file, no more than `limit` bytes and a character are looked at at once, and no byte is lost."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_LINE_BYTES", limit)
        with path.open("rb") as file:
            pieces = [(len(line), num_chars) for line, num_chars in module.lines_of_text(file, path)]
        found = list(PlainText(document_chars=document_chars).scan(path))
    assert sum(size for size, _ in pieces) == len(text.encode()) and sum(chars for _, chars in pieces) == len(text)
    assert all(size <= limit + 3 for size, _ in pieces)
    assert "".join(PlainText(document_chars=0).read(path, *span) for span in found) == text


def test_json_lines(tmp_path):
    rows = [{"text": "one\n", "body": "eins"}, {"text": "", "body": "zwei"}, {"text": "drei 😀", "body": "3"}]
    rows.append({"text": None, "body": None})
    path = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps(row) for row in rows))
    assert texts(documents_of([path])) == ["one\n", "drei 😀"]
    assert texts(documents_of([path], text_column="body", document_chars=1)) == ["eins", "zwei", "3"]


def test_json_lines_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    assert texts(documents_of([path])) == ["one", "two"]


def test_a_long_line_takes_a_few_times_its_size(tmp_path):
    size = 16 * 2**20
    write(tmp_path / "a.jsonl", json.dumps({"text": "x" * size}))
    tracemalloc.start()
    try:
        assert len(documents_of([tmp_path / "a.jsonl"])) == 1
        assert tracemalloc.get_traced_memory()[1] < 3.5 * size
    finally:
        tracemalloc.stop()


def test_a_line_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_RECORD_BYTES", 2**20)
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x"}) + "\n" + json.dumps({"text": "x" * 2**20}))
    with pytest.raises(DataError, match=r"a\.jsonl:2: a line of more than 1 MiB: put one document on each line"):
        documents_of([path])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": ', "not valid JSON"),
        (b'{"body": "x"}', "no field 'text'; it has 'body'"),
        (b'{"text": 3}', "field 'text' is of type int, not text"),
        (b"[1]", "a document must be a JSON object"),
        (b"[" * 100_000, "JSON that is nested too deeply"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (b'{"text": "\\ud800"}', "not valid UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {re.escape(complaint)}"):
        documents_of([path])


def test_invalid_utf8_names_file_and_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("größe\n".encode() + b"ab\xffcd\n")
    with pytest.raises(DataError, match=r"a\.txt: not valid UTF-8 at byte 10 "):
        documents_of([path])


def test_missing_empty_and_repeated_sources_are_refused(tmp_path):
    with pytest.raises(DataError, match="doesn't exist, and no file matches it"):
        find_files([str(tmp_path / "nothing.txt")])
    with pytest.raises(DataError, match="'/dev/null' is neither a regular file nor a folder"):
        find_files(["/dev/null"])
    with pytest.raises(DataError, match="doesn't exist, and no file matches it"):
        find_files([str(tmp_path / "*.txt")])
    with pytest.raises(DataError, match=r"has no readable file \(.txt, .jsonl, .arrow"):
        find_files([str(tmp_path)])
    path = write(tmp_path / "a.txt", "a")
    with pytest.raises(DataError, match=r"a\.txt: named by two"):
        find_files([str(path), str(tmp_path)])


def test_a_packed_file_is_not_taken_for_text(tmp_path):
    with pytest.raises(DataError, match=r"a\.zip is packed, and only \.gz, \.bz2, \.xz, \.zst are read"):
        find_files([str(write(tmp_path / "a.zip", "x"))])
    with pytest.raises(DataError, match=r"a\.parquet\.gz: compressed parquet is not read"):
        find_files([str(write(tmp_path / "a.parquet.gz", "x"))])


def test_a_folders_other_files_are_not_taken_for_text_or_tokens(tmp_path):
    """But a dataset of Megatron-LM, which an index marks, and compressed text are."""
    for name in ("config.json", "pytorch_model.bin", "weights.npy", "b.idx", "b.bin", "a.safetensors"):
        write(tmp_path / name, "")
    assert [(file.path.name, file.format) for file in find_files([str(tmp_path)])] == [
        ("a.safetensors", "tokens"),
        ("b.bin", "tokens"),
    ]
    for name in ("c.txt.zst", "d.json.gz", "e.json"):
        write(tmp_path / "text" / name, "")
    found = find_files([str(tmp_path / "text"), str(tmp_path / "*.json")])
    assert [(file.path.name, file.format) for file in found] == [
        ("c.txt.zst", "text"),
        ("d.json.gz", "json"),
        ("config.json", "json"),
    ]


def test_tokens_and_text_do_not_mix(tmp_path):
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "a.safetensors", "")
    with pytest.raises(DataError, match=r"mixes tokens \(.*a\.safetensors\) with text \(.*a\.txt\)"):
        find_files([str(tmp_path)])


def test_a_file_that_shrank_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", "some text")
    documents = documents_of([path])
    path.write_bytes(b"some")
    with pytest.raises(DataError, match=r"a\.txt: shorter than when"):
        documents.read(0)


def test_a_document_set_takes_indices_in_range_only(tmp_path):
    documents = documents_of([write(tmp_path / "a.txt", "some text")])
    for index in (-1, 1):
        with pytest.raises(IndexError):
            documents.read(index)


def test_the_built_in_corpus_is_the_library_and_its_help():
    files = find_files([])
    names = [file.path.name for file in files]
    assert {"argparse.py", "inspect.py"} <= set(names)
    assert not any("site-packages" in file.path.parts or "test" in file.path.parts for file in files)
    topics = scan([file for file in files if file.format == "help_topics"])
    assert len(topics) > 50
    assert any("for" in text and "statement" in text for text in texts(topics))
