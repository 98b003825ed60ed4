"""Arrow and Parquet: the same documents from every kind of file, in bounded memory; bad files are named."""

import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.data import columns
from parallel3d.data.columns import extract_text, is_readable_in_place, scan_arrow
from parallel3d.errors import DataError

TEXTS = ["one\n", "", None, "zwei 😀 größe", "three\n\n", "x" * 3000, None, "end"]
TEXT = pa.string()
KINDS = ["file", "stream", "compressed", "parquet", "parquet snappy"]
TYPES = [TEXT, pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]


def write_table(path, texts, kind, *, type=TEXT, batch_rows=3):
    """Writes a table of one column more than is read, as `kind`; returns the path."""
    table = pa.table({"number": list(range(len(texts))), "text": pa.array(texts, pa.string()).cast(type)})
    if kind.startswith("parquet"):
        pq.write_table(table, path, row_group_size=batch_rows, compression="snappy" if "snappy" in kind else "none")
        return path
    options = pa.ipc.IpcWriteOptions(compression="lz4" if kind == "compressed" else None)
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with new(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def documents(path, tmp_path, column="text"):
    """Texts as training would read them."""
    if path.suffix == ".arrow" and is_readable_in_place(path, column):
        where, spans = path, list(scan_arrow(path, column))
    else:
        where = tmp_path / "unpacked.text"
        with where.open("wb") as target:
            spans = list(extract_text(path, path.suffix[1:], column, target))
    data = where.read_bytes()
    return [data[offset : offset + size].decode() for offset, size in spans]


def path_of(tmp_path, kind):
    return tmp_path / ("a.parquet" if kind.startswith("parquet") else "a.arrow")


@pytest.mark.parametrize("type", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_has_the_same_documents(tmp_path, kind, type):
    if kind.startswith("parquet") and type == pa.string_view():
        pytest.skip("Parquet files of this kind do not exist")
    path = write_table(path_of(tmp_path, kind), TEXTS, kind, type=type)
    assert documents(path, tmp_path) == [text for text in TEXTS if text]
    is_plain = type in (pa.string(), pa.large_string())
    assert kind.startswith("parquet") or is_readable_in_place(path, "text") == (is_plain and kind != "compressed")


@given(
    texts=st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=40),
    kind=st.sampled_from(KINDS),
    batch_rows=st.integers(1, 50),
    batch_bytes=st.sampled_from([1, 40, 10**6]),
)
def test_batches_of_any_size_lose_nothing(tmp_path_factory, texts, kind, batch_rows, batch_bytes):
    folder = tmp_path_factory.mktemp("columns")
    path = write_table(path_of(folder, kind), texts, kind, batch_rows=batch_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "BATCH_BYTES", batch_bytes)
        assert documents(path, folder) == [text for text in texts if text]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_wrong_column_is_reported_with_the_existing_ones(tmp_path, kind):
    path = write_table(path_of(tmp_path, kind), TEXTS, kind)
    with pytest.raises(
        DataError, match=rf"{path.name}: no column 'body'; it has 'number', 'text'. Set data.text_column"
    ):
        documents(path, tmp_path, column="body")
    with pytest.raises(DataError, match=rf"{path.name}: column 'number' is int64, not text"):
        documents(path, tmp_path, column="number")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused(tmp_path, kind, share):
    path = write_table(path_of(tmp_path, kind), ["some text"] * 1000, kind)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError, match=rf"{path.name}: .*(Arrow|Parquet) file, (its layout|only the rows)|empty, not"):
        documents(path, tmp_path)


@pytest.mark.parametrize("kind", ["file", "compressed"])
@pytest.mark.parametrize("missing", [1, 5, 400])
def test_an_arrow_file_without_its_end_says_how_long_it_is(tmp_path, kind, missing):
    path = write_table(path_of(tmp_path, kind), ["some text"] * 1000, kind)
    path.write_bytes(path.read_bytes()[:-missing])
    size = path.stat().st_size
    with pytest.raises(DataError, match=rf"truncated: the end of an Arrow file is missing after its {size:,} bytes"):
        documents(path, tmp_path)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_damaged_offset_is_found_by_its_row(tmp_path, kind):
    """Of row 1,207, in the second of three batches."""
    path = write_table(path_of(tmp_path, kind), [f"{row:8}" for row in range(3000)], kind, batch_rows=1000)
    data, good = path.read_bytes(), (8 * 207).to_bytes(4, "little")
    second = data.index((8 * 206).to_bytes(4, "little") + good, data.index(b"       0" + b"       1"))
    path.write_bytes(data[: second + 4] + (-5).to_bytes(4, "little", signed=True) + data[second + 8 :])
    with pytest.raises(DataError, match=rf"{path.name}, row 1206 \(from 0\): damaged \(Offset invariant failure"):
        documents(path, tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_damage_is_found_by_its_row(tmp_path, kind):
    """In the second of three parts: a changed page, a stream that ends."""
    rows = random.Random(5)
    table = pa.table({"text": [rows.randbytes(100).hex() for _ in range(3000)]})
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(table, path, row_group_size=1000, compression="snappy", use_dictionary=False)
        begin = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
        data = bytearray(path.read_bytes())
        data[begin + 3000 : begin + 3400] = bytes(400)
    else:
        path = tmp_path / "a.arrow"
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table, max_chunksize=1000)
        data = bytearray(path.read_bytes()[: path.stat().st_size // 2])
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path.name}: not an intact \w+ file, only the rows before row 1,000 can"):
        documents(path, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_utf8_names_file_and_row(tmp_path, kind):
    path = path_of(tmp_path, kind)
    good = [b"fine"] * 7
    raw = pa.array([*good, b"\xffx", b"end"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    table = pa.table({"text": text})
    if kind.startswith("parquet"):
        pq.write_table(table, path, row_group_size=5)
    else:
        options = pa.ipc.IpcWriteOptions(compression="lz4" if kind == "compressed" else None)
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(path, table.schema, options=options) as out:
            out.write_table(table, max_chunksize=5)
    with pytest.raises(DataError, match=rf"{path.name}, row 7 \(from 0\): not valid UTF-8"):
        documents(path, tmp_path)


def test_a_damaged_name_of_a_column_names_the_file(tmp_path):
    path = write_table(tmp_path / "a.arrow", TEXTS, "file")
    path.write_bytes(path.read_bytes().replace(b"number", b"numb\xff\xfe"))
    with pytest.raises(DataError, match=r"a\.arrow: not an intact Arrow file"):
        documents(path, tmp_path)


def test_a_partly_compressed_file_is_refused(tmp_path):
    """The parts of two files in one stream: batches of one schema may differ in compression."""
    schema, path = pa.schema([("text", pa.string())]), tmp_path / "a.arrow"
    batch = pa.record_batch([pa.array(["some text"] * 100)], schema=schema)
    parts = []
    for compression in (None, "lz4"):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_batch(batch)
        parts.append(sink.getvalue().to_pybytes())
    header = parts[1].index(b"\xff\xff\xff\xff", 8)  # behind the schema
    path.write_bytes(parts[0][:-8] + parts[1][header:])
    with pytest.raises(DataError, match="batch 1 is compressed, and earlier ones are not"):
        documents(path, tmp_path)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write_table(tmp_path / "a.arrow", TEXTS, "file")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a\.arrow: needs pyarrow.*pip install pyarrow"):
        documents(path, tmp_path)


SCAN = """
import sys
from pathlib import Path
from parallel3d.data.columns import extract_text, scan_arrow
import pyarrow, pyarrow.ipc, pyarrow.parquet
path = Path(sys.argv[1])
peak = lambda: int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = peak()
with open(sys.argv[2], "wb") as target:
    kind = path.suffix[1:]
    rows = extract_text(path, kind, "text", target) if kind == "parquet" else scan_arrow(path, "text")
    total = sum(size for _, size in rows)
print(total, peak() - before)
"""


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    """240 MB of text, all in one batch: finding its documents takes a fraction of that."""
    text = random.Random(1).randbytes(1000).hex()
    texts = [text[number % 2000 :] + text[: number % 2000] for number in range(120_000)]
    path = write_table(path_of(tmp_path, kind), texts, kind, batch_rows=10**6)
    command = [sys.executable, "-c", SCAN, str(path), str(tmp_path / "unpacked")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    total, grown_kib = map(int, done.stdout.split())
    assert total == 240_000_000
    assert grown_kib < 100 * 1024, grown_kib
