"""Folders as `save_to_disk` of Hugging Face's library `datasets` writes them; reading needs pyarrow, not that library.

    state.json           lists the Arrow streams of a dataset in the order of its rows
    dataset_dict.json    lists the splits of several, each a dataset in a folder of its name

The same folder may hold further .arrow files (cache-*.arrow, of the library's map and filter): only listed ones count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from parallel3d.errors import DataError, shorten

STATE, SPLITS = "state.json", "dataset_dict.json"
TRAIN_SPLIT, VALIDATION_SPLIT = "train", "validation"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The last bytes of a stream that was closed. The format doesn't demand them, `save_to_disk` writes them."""


def is_dataset(folder: Path) -> bool:
    """Whether a folder is a saved dataset, or several; a state.json alone may be anything."""
    if (folder / SPLITS).is_file():
        return True
    return (folder / STATE).is_file() and "_data_files" in _read_object(folder / STATE)


def dataset_files(folder: Path) -> list[Path]:
    """The streams of a dataset, or of the split `train` of several. Raises DataError that names the file."""
    if not (folder / SPLITS).is_file():
        return _streams(folder)
    splits = _splits(folder)
    if TRAIN_SPLIT not in splits:
        names = shorten(", ".join(map(repr, splits)))
        raise DataError(
            f"{folder}: a dataset without a split {TRAIN_SPLIT!r}; it has {names}: name the folder of one of them"
        )
    return _streams_of_split(folder, TRAIN_SPLIT)


def validation_files(folder: Path) -> list[Path]:
    """The streams of the split `validation` of several; none of a single dataset."""
    has_one = (folder / SPLITS).is_file() and VALIDATION_SPLIT in _splits(folder)
    return _streams_of_split(folder, VALIDATION_SPLIT) if has_one else []


def _splits(folder: Path) -> list[str]:
    splits = _read_object(folder / SPLITS).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise DataError(f"{folder / SPLITS}: has no list of splits")
    return splits


def _streams_of_split(folder: Path, split: str) -> list[Path]:
    if not (folder / split / STATE).is_file():
        raise DataError(f"{folder / split / STATE}: missing, and {SPLITS} lists the split")
    return _streams(folder / split)


def _streams(folder: Path) -> list[Path]:
    state = _read_object(folder / STATE)
    if state.get("_indices_data_files"):
        raise DataError(f"{folder}: a selection of rows by an older version of datasets: load it and save it again")
    entries = state.get("_data_files")
    names = [each.get("filename") for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    if not names:
        raise DataError(f"{folder / STATE}: lists no files")
    paths = []
    for name in names:
        if not isinstance(name, str) or PurePath(name).name != name:
            raise DataError(f"{folder / STATE}: lists {name!r}, which is not the name of a file in its folder")
        if not (path := folder / name).is_file():
            raise DataError(f"{path}: missing, and {STATE} lists it")
        _check_end(path)
        paths.append(path)
    return paths


def _check_end(path: Path) -> None:
    """Raises DataError for a file that was cut off, which between two batches no reader of streams would notice."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - len(END_OF_STREAM)))
        if file.read() != END_OF_STREAM:
            raise DataError(f"{path}: truncated: the stream has no end at byte {size:,}")


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: must be a JSON object")
    return content
