"""Index of documents: rows of (file, offset, size), int64, in a file that is memory-mapped for reading.

Only the last rows of a scan, and the pages that were read, are in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

SPLITS = {name: f"{name}.places" for name in ("train", "validation")}
"""The files of a corpus, by split."""
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
    folder: Path, rows: Iterable[np.ndarray], validation_fraction: float, held_out_files: Collection[int] = ()
) -> int:
    """Writes the index of each split, and returns the number of training documents; without any it writes no file.

    With `held_out_files` their documents are for validation, and no others.
    """
    write_document_index(folder / ALL, rows)
    document_index = load_document_index(folder / ALL)
    splits = split(len(document_index), validation_fraction)
    if held_out_files:
        is_held_out = np.isin(document_index[:, 0], list(held_out_files))
        splits = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    if len(splits[0]):
        for name, indices in zip(SPLITS.values(), splits):
            starts = range(0, len(indices), ROWS_AT_ONCE)
            write_document_index(
                folder / name, (document_index[indices[start : start + ROWS_AT_ONCE]] for start in starts)
            )
    (folder / ALL).unlink()
    return len(splits[0])


def load_split(folder: Path) -> dict[str, np.ndarray]:
    """Returns the index of each split, memory-mapped."""
    return {name: load_document_index(folder / file) for name, file in SPLITS.items()}


def split(num_documents: int, validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the training and the validation documents: the latter spread evenly over the corpus.

    At least one document is for validation if the fraction is above 0, and at least one for training.
    """
    wanted = max(1, round(num_documents * validation_fraction)) if validation_fraction > 0 else 0
    num_validation = min(wanted, num_documents - 1)
    validation = (2 * np.arange(num_validation) + 1) * num_documents // max(1, 2 * num_validation)
    return np.delete(np.arange(num_documents), validation), validation
