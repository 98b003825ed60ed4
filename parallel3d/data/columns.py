"""Columns of text: Arrow IPC (file or stream) and Parquet, read one batch at a time.

In an uncompressed Arrow file the documents of a batch are consecutive bytes: they are indexed once, and read in place.
Those of Parquet files and compressed Arrow files can't be read one by one; they are written to a file of the cache,
once. A null is not a document. Only indexing needs pyarrow, reading doesn't.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from parallel3d.errors import DataError

BATCH_BYTES = 4 * 2**20
"""Approximate size of the text in memory. At least one page of a Parquet column (set by its writer, usually 1,024 rows
or 1 MB), or one batch of a compressed Arrow file."""
MAX_BATCH_ROWS = 65_536
ROWS_AT_ONCE = 256
"""Rows that become Python's values at once."""
ARROW_FILE_MAGIC = b"ARROW1"


class _Place:
    """Where a file is being read."""

    row = -1
    """Rows before this one have been read; -1: the layout has not."""


def is_readable_in_place(path: Path, column: str) -> bool:
    """Whether the text of an Arrow file can be read in place: plain strings, not compressed."""
    spans = ((chunk.buffers()[2], span) for chunk, span in _arrow_spans(path, column))
    return next((span is not None for buffer, span in spans if buffer), True)


def scan_arrow(path: Path, column: str) -> Iterator[tuple[int, int]]:
    """Yields (offset in the file, bytes) of each document of an uncompressed Arrow file."""
    for batch, (_, span) in enumerate(_arrow_spans(path, column)):
        if span is None:
            raise DataError(f"{path}: batch {batch} is compressed, and earlier ones are not: write the file again")
        yield from _ranges(*span)


def extract_text(path: Path, kind: str, column: str, target: BinaryIO) -> Iterator[tuple[int, int]]:
    """Writes the documents of a Parquet file (`kind` parquet) or an Arrow file to `target`, and yields the range of
    each."""
    chunks = _parquet_chunks(path, column) if kind == "parquet" else (chunk for chunk, _ in _arrow_spans(path, column))
    position = 0
    for chunk in chunks:
        data, offsets, valid = _layout(chunk)
        first, last = int(offsets[0]), int(offsets[-1])
        target.write(data[first:last])
        yield from _ranges(position - first, offsets, valid)
        position += last - first


def iterate_rows(path: Path, kind: str, choose: Callable[[list[str]], Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a Parquet file (`kind` parquet) or an Arrow file as Python's values, those of the columns that
    `choose` picks from all names."""
    arrow = _pyarrow(path)
    with _readable(path, "Parquet" if kind == "parquet" else "Arrow") as place:
        if kind == "parquet":
            file = arrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
            columns = [*choose(file.schema_arrow.names)]
            place.row = 0
            batches = file.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False)
        else:
            batches = _whole_batches(arrow, arrow.memory_map(str(path)).read_buffer(), place)
        for batch in batches:
            chosen = batch.select([*choose(batch.schema.names)])
            for start in range(0, chosen.num_rows, ROWS_AT_ONCE):
                yield from chosen.slice(start, ROWS_AT_ONCE).to_pylist()
            place.row += batch.num_rows


Span = tuple[int, np.ndarray, np.ndarray]
"""Start of a batch's text in the file, offsets of its rows from there (one more than rows), and which are valid."""


def _ranges(begin: int, offsets: np.ndarray, valid: np.ndarray) -> Iterator[tuple[int, int]]:
    sizes = np.diff(offsets) * valid
    rows = np.flatnonzero(sizes)
    return zip((begin + offsets[rows]).tolist(), sizes[rows].tolist())


def _arrow_spans(path: Path, column: str) -> Iterator[tuple[Any, Span | None]]:
    """Yields the column of each batch, checked, and its position in the file; None if it is compressed."""
    arrow = _pyarrow(path)
    with _readable(path, "Arrow") as place, path.open("rb") as file:
        if not path.stat().st_size:
            raise DataError(f"{path}: empty, not an Arrow file")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        whole = arrow.py_buffer(mapped)
        seen = 0
        for batch in _batches(arrow, whole, place):
            chunk = _text_of(path, batch, column, place.row)
            place.row += batch.num_rows
            buffer = chunk.buffers()[2]
            begin = buffer.address - whole.address if buffer else 0
            in_place = 0 <= begin < whole.size and chunk.type == batch.schema.field(column).type
            _, offsets, valid = _layout(chunk)
            yield chunk, ((begin, offsets, valid) if in_place else None)
            seen += chunk.nbytes
            if seen >= BATCH_BYTES:  # pages that were read count as memory of this process until released
                mapped.madvise(mmap.MADV_DONTNEED)
                seen = 0


def _batches(arrow: Any, whole: Any, place: _Place) -> Iterator[Any]:
    """Yields the record batches of an IPC file or stream, large ones in parts; sets `place` to the first row."""
    for batch in _whole_batches(arrow, whole, place):
        rows = _rows_at_once(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def _rows_at_once(num_rows: int, num_bytes: int) -> int:
    """Number of rows that hold about BATCH_BYTES."""
    return min(max(BATCH_BYTES * num_rows // max(num_bytes, 1), 1), MAX_BATCH_ROWS)


def _whole_batches(arrow: Any, whole: Any, place: _Place) -> Iterator[Any]:
    size, is_file = len(ARROW_FILE_MAGIC), whole.slice(0, len(ARROW_FILE_MAGIC)).to_pybytes() == ARROW_FILE_MAGIC
    if is_file and whole.slice(max(whole.size - size, size)).to_pybytes() != ARROW_FILE_MAGIC:
        raise arrow.ArrowInvalid(f"truncated: the end of an Arrow file is missing after its {whole.size:,} bytes")
    reader = arrow.ipc.open_file(whole) if is_file else arrow.ipc.open_stream(whole)
    place.row = 0
    if is_file:
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _parquet_chunks(path: Path, column: str) -> Iterator[Any]:
    """Yields the column of a Parquet file, some rows at a time, checked."""
    arrow = _pyarrow(path)
    with _readable(path, "Parquet") as place:
        file = arrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
        _check_column(path, file.schema_arrow, column)
        place.row = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            rows = _rows_at_once(group.num_rows, group.total_byte_size)
            for batch in file.iter_batches(rows, row_groups=[number], columns=[column], use_threads=False):
                yield _text_of(path, batch, column, place.row)
                place.row += batch.num_rows


def _text_of(path: Path, batch: Any, column: str, row: int) -> Any:
    """Returns the column as an array of valid UTF-8 strings; `row` is the number of the batch's first row."""
    arrow = _pyarrow(path)
    _check_column(path, batch.schema, column)
    chunk = batch.column(column)
    if chunk.type not in (arrow.string(), arrow.large_string()):
        chunk = chunk.cast(arrow.large_string())
    try:
        chunk.validate(full=True)
    except arrow.ArrowInvalid as error:
        bad = next((number for number in range(len(chunk)) if not _is_valid(arrow, chunk.slice(number, 1))), None)
        where = f"{path}, row {row + bad} (from 0)" if bad is not None else str(path)
        what = "not valid UTF-8" if "UTF8" in str(error) else "damaged"
        raise DataError(f"{where}: {what} ({error})") from error
    return chunk


def _is_valid(arrow: Any, chunk: Any) -> bool:
    try:
        chunk.validate(full=True)
    except arrow.ArrowInvalid:
        return False
    return True


def _check_column(path: Path, schema: Any, column: str) -> None:
    """Raises DataError if the column is missing or isn't text."""
    arrow = _pyarrow(path)
    if schema.names.count(column) != 1:
        names = ", ".join(map(repr, schema.names))
        problem = "no column" if column not in schema.names else "more than one column"
        raise DataError(f"{path}: {problem} {column!r}; it has {names}. Set data.text_column to a column of text")
    kind = schema.field(column).type
    inner = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(inner) or arrow.types.is_large_string(inner) or arrow.types.is_string_view(inner)):
        raise DataError(f"{path}: column {column!r} is {kind}, not text. Set data.text_column to a column of text")


def _layout(chunk: Any) -> tuple[memoryview, np.ndarray, np.ndarray]:
    """Returns the bytes of an array of strings, its rows' offsets in them, int64 (rows + 1,), and which rows are
    valid."""
    wide = str(chunk.type).startswith("large")
    _, offsets, data = chunk.buffers()
    if offsets is None or not len(chunk):
        return memoryview(b""), np.zeros(len(chunk) + 1, np.int64), np.zeros(len(chunk), bool)
    bounds = np.frombuffer(offsets, np.int64 if wide else np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
    valid = chunk.is_valid().to_numpy(zero_copy_only=False)
    return memoryview(data or b""), bounds.astype(np.int64), valid


@contextmanager
def _readable(path: Path, kind: str) -> Iterator[_Place]:
    """Turns errors of reading into a DataError that names the file and the place."""
    arrow, place = _pyarrow(path), _Place()
    try:
        yield place
    except (arrow.ArrowException, OSError, UnicodeError) as error:  # UnicodeError: names of columns
        where = "its layout can't be read" if place.row < 0 else f"only the rows before row {place.row:,} can be read"
        raise DataError(f"{path}: not an intact {kind} file, {where} ({' '.join(str(error).split())})") from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow, which is not installed: pip install pyarrow") from error
    return pyarrow
