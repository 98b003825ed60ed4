"""Compressed text and JSON arrays give the documents of the plain file; damaged ones are named."""

import bz2
import gzip
import json
import lzma
import random
import re
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data import compressed
from parallel3d.data.compressed import extract_documents
from parallel3d.data.formats import DocumentSet, build_formats
from parallel3d.data.sources import COMPRESSIONS, find_files
from parallel3d.errors import DataError
from tests.support.word_corpus import lines, open_words

ZSTD = zstandard.ZstdCompressor(write_checksum=True).compress  # as the command does
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": ZSTD, "": bytes}
TEXTS = ["one\n", "zwei 😀 é", "", "three " * 50, "[4, {]"]


def extract(path, kind, *, document_chars=0):
    """The documents' texts, as they are found in the file of the cache."""
    target = path.parent / "out"
    with target.open("wb") as file:
        settings = dict(text_column="text", document_chars=document_chars, target=file)
        spans = list(extract_documents(path, kind, **settings))
    data = target.read_bytes()
    assert sum(size for _, size in spans) == len(data)
    return [data[offset : offset + size].decode() for offset, size in spans]


def test_every_compression_has_a_test():
    assert set(COMPRESS) == {"", *COMPRESSIONS}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("chunk_bytes", [1, 7, 2**20])
def test_the_same_documents(tmp_path, monkeypatch, compression, chunk_bytes):
    """Lines, an array and objects in a row, plain and compressed, whatever is read at once."""
    monkeypatch.setattr(compressed, "CHUNK_BYTES", chunk_bytes)
    rows = [json.dumps({"text": text, "n": [1, {"a": None}]}, ensure_ascii=False) for text in TEXTS]
    forms = {
        "jsonl": ["\n\n".join(rows)],
        "json": [
            "[" + " ,\n".join(rows) + "]\n",
            " " + "\n".join(rows),
            "".join(rows),
            json.dumps(json.loads(f"[{','.join(rows)}]")),
        ],
    }
    for kind, variants in forms.items():
        for number, text in enumerate(variants):
            for mark in (b"", b"\xef\xbb\xbf"):
                path = tmp_path / f"{number}.{kind}{compression}"
                path.write_bytes(COMPRESS[compression](mark + text.encode()))
                assert extract(path, kind) == [text for text in TEXTS if text], (kind, number, mark)


@given(
    records=st.lists(
        st.dictionaries(st.sampled_from(["text", "b"]), st.text(st.characters(codec="utf-8"))), max_size=5
    ),
    indent=st.sampled_from([None, 1]),
    is_escaped=st.booleans(),
    chunk_bytes=st.integers(1, 30),
)
def test_arrays_of_objects(tmp_path_factory, records, indent, is_escaped, chunk_bytes):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_bytes(
        json.dumps([{"text": "", **each} for each in records], indent=indent, ensure_ascii=is_escaped).encode()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed, "CHUNK_BYTES", chunk_bytes)
        assert extract(path, "json") == [each["text"] for each in records if each.get("text")]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_text_is_cut_as_a_plain_file_is(tmp_path, compression):
    text = "".join(f"line {number} é\n" for number in range(500))
    (tmp_path / "a.txt").write_text(text)
    plain = DocumentSet(
        files=find_files([str(tmp_path / "a.txt")]),
        formats=build_formats(text_column="text", document_chars=300),
        document_index=None,
    )
    spans = plain.formats["text"].scan(tmp_path / "a.txt")
    path = tmp_path / f"a.txt{compression}"
    path.write_bytes(COMPRESS[compression](text.encode()))
    assert extract(path, "text", document_chars=300) == [text.encode()[a : a + n].decode() for a, n in spans]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("damage", ["cut", "changed", "not compressed"])
def test_a_damaged_file_is_named(tmp_path, compression, damage):
    words = random.Random(7)
    lines = "".join(json.dumps({"text": words.randbytes(200).hex()}) + "\n" for _ in range(8000))
    data = bytearray(COMPRESS[compression](lines.encode()))
    begin = len(data) // 2
    if damage == "cut":
        del data[begin:]
    elif damage == "changed":
        data[begin : begin + 40] = bytes(40)
    else:
        data, begin = lines.encode(), 0
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(data)
    place = r": damaged or truncated before byte ([\d,]+) of ([\d,]+) "
    with pytest.raises(DataError, match=rf"a\.jsonl{compression}({place}|:\d+: not valid)") as refused:
        extract(path, "jsonl")
    if found := re.search(place, str(refused.value)):
        at, size = (int(number.replace(",", "")) for number in found.groups())
        assert begin <= at <= size == len(data)


def test_several_frames_follow_each_other(tmp_path):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"".join(zstandard.compress(part) for part in (b"one\n", b"", b"two\n")))
    assert extract(path, "text") == ["one\ntwo\n"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"text": "a"}', "truncated: the array has no end"),
        ('[{"text": "a"} {"text": "b"}]', "'{' where the array should go on"),
        ('[{"text": "a"}] {"text": "b"}', "text after the end of the array"),
        ('[{"text": "a"}, {"text": "b', "not valid JSON, or truncated"),
        ('{"text": "a"', "not valid JSON, or truncated"),
        ('[{"text": "a"}, 3]', "object 2: a document must be a JSON object, and this one is of type int"),
        ('{"text": "a"}{"txt": "a"}', "object 2: no field 'text'; it has 'txt'"),
        ('{"text": "\\ud800"}', "object 1: not valid UTF-8"),
        ("[" * 100_000, "JSON that is nested too deeply|not valid JSON"),
    ],
)
def test_bad_json_is_named(tmp_path, text, problem):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"a\.json: ({problem})"):
        extract(path, "json")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (b"\xff", r"not valid UTF-8 \(invalid start byte\), at character 2,400,010"),
        (b"'", r"not valid JSON, or truncated \(Expecting value\), at character 2,400,010, behind 1,191 whole values"),
        (b'"y"', r"not valid JSON, or truncated \(Expecting ',' delimiter\), at character 2,400,013, behind 1,191 "),
    ],
    ids=["utf8", "json", "quote"],
)
def test_bad_json_is_found_in_a_long_file(tmp_path, damage, problem):
    """Beyond what is held at once."""
    path, value = tmp_path / "a.json", b'{"text": "' + b"a" * 2000 + b'"},\n'
    head = b"[" + value * (2_400_000 // len(value))
    filler = b" " * (2_400_001 - len(head))
    path.write_bytes(head + filler + b'{"text": ' + damage + b'x"}]')
    with pytest.raises(DataError, match=rf"a\.json: {problem}"):
        extract(path, "json")


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.json.gz", "a.json"])
def test_memory_is_bounded(tmp_path, name):
    path, lines = tmp_path / name, [json.dumps({"text": f"{number} " * 200}) for number in range(20_000)]
    text = ("\n" if "jsonl" in name else ",").join(lines)
    path.write_bytes(
        COMPRESS[path.suffix if path.suffix in COMPRESS else ""]((text if "jsonl" in name else f"[{text}]").encode())
    )
    del lines, text
    with (tmp_path / "out").open("wb") as target:
        tracemalloc.start()
        found = extract_documents(path, name.split(".")[1], text_column="text", document_chars=0, target=target)
        assert sum(1 for _ in found) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert target.closed and (tmp_path / "out").stat().st_size > 20 * 2**20 > 2 * peak


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.txt.zst"])
def test_a_corpus_of_it_is_that_of_the_plain_text(tmp_path, name):
    """Indexed, tokenised, and read again from the cache when the file is opened a second time."""
    texts = lines()
    texts = texts if "txt" in name else [json.dumps({"text": text}) for text in texts]
    plain = "".join(texts) if "txt" in name else "\n".join(texts) if "jsonl" in name else f"[{','.join(texts)}]"
    path = tmp_path / name
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](plain.encode()))
    settings = dict(tokenizer=TokenizerConfig(kind="bytes"), document_chars=2000)
    for _ in range(2):
        corpus = open_words(path, tmp_path / "cache", **settings)
    found = [corpus.train.documents.read(index) for index in range(len(corpus.train))]
    found += [corpus.validation.documents.read(index) for index in range(len(corpus.validation))]
    assert sorted("".join(found).splitlines(keepends=True)) == sorted(lines())
    assert len(found) == (1500 if "json" in name else len(found)) and max(map(len, found)) <= 2000
