"""Index of documents: rows of (file, offset, size), int64, in a file that is memory-mapped for reading.

Only the last rows of a scan, and the pages that were read, are in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

SPLITS = {name: f"{name}.places" for name in ("train", "validation", "test")}
"""The files of a corpus, by split; there is one for the test if it has documents."""
ALL = "all.places"
ROWS_AT_ONCE = 16_384
COLUMNS = 3


def write_document_index(path: Path, rows: Iterable[np.ndarray]) -> None:
    """Writes blocks of rows, (rows, 3) each, as they come."""
    with path.open("wb") as file:
        for block in rows:
            file.write(np.ascontiguousarray(block, np.int64).tobytes())


def load_document_index(path: Path) -> np.ndarray:
    """Returns all rows, int64 (documents, 3), mapped."""
    if not path.stat().st_size:  # an empty file can't be mapped
        return np.zeros((0, COLUMNS), np.int64)
    return np.memmap(path, np.int64, "r").reshape(-1, COLUMNS)


def blocks(rows: Iterable[tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Gathers rows into arrays."""
    rows = iter(rows)
    while block := list(islice(rows, ROWS_AT_ONCE)):
        yield np.array(block, np.int64)


def write_split(
    folder: Path,
    rows: Iterable[np.ndarray],
    *,
    validation_fraction: float,
    test_fraction: float,
    held_out_files: Collection[int] = (),
) -> int:
    """Writes the index of each split, and returns the number of training documents; without any it writes no file.

    With `held_out_files` their documents are for validation, no others are, and none is for a test.
    """
    write_document_index(folder / ALL, rows)
    document_index = load_document_index(folder / ALL)
    splits = split(len(document_index), validation_fraction, test_fraction)
    if held_out_files:
        is_held_out = np.isin(document_index[:, 0], list(held_out_files))
        splits = dict(train=np.flatnonzero(~is_held_out), validation=np.flatnonzero(is_held_out))
    elif not len(splits["test"]):
        del splits["test"]
    if num_training := len(splits["train"]):
        for name, indices in splits.items():
            starts = range(0, len(indices), ROWS_AT_ONCE)
            write_document_index(
                folder / SPLITS[name], (document_index[indices[start : start + ROWS_AT_ONCE]] for start in starts)
            )
    (folder / ALL).unlink()
    return num_training


def split_files(folder: Path) -> list[Path]:
    """The index of each split that there is, in the order of SPLITS."""
    return [folder / file for file in SPLITS.values() if (folder / file).exists()]


def load_split(folder: Path) -> dict[str, np.ndarray]:
    """Returns the index of each split, memory-mapped; that of the test is empty where there is none."""
    found = {path.name: load_document_index(path) for path in split_files(folder)}
    return {name: found.get(file, np.zeros((0, COLUMNS), np.int64)) for name, file in SPLITS.items()}


def split(num_documents: int, validation_fraction: float, test_fraction: float = 0.0) -> dict[str, np.ndarray]:
    """Returns the indices of the documents of each split: those held out are spread evenly over the corpus, and those
    for the test evenly over these.

    At least one document is for training, then at least one for validation and for the test if its fraction is above 0.
    """
    num_validation, num_test = (
        max(1, round(num_documents * fraction)) if fraction > 0 else 0
        for fraction in (validation_fraction, test_fraction)
    )
    num_validation = min(num_validation, max(0, num_documents - 1))
    num_test = min(num_test, max(0, num_documents - 1 - num_validation))
    held_out = _spread(num_validation + num_test, num_documents)
    test = _spread(num_test, len(held_out))
    return {
        "train": np.delete(np.arange(num_documents), held_out),
        "validation": np.delete(held_out, test),
        "test": held_out[test],
    }


def _spread(count: int, total: int) -> np.ndarray:
    """`count` indices below `total` at equal distances."""
    return (2 * np.arange(count) + 1) * total // max(1, 2 * count)
