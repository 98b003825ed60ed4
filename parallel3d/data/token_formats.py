"""Files of tokens that other programs have written, beside our own (token_file.py): found by their suffix.

    .safetensors   one tensor `tokens`
    .npy           NumPy's format: one dimension of whole numbers
    .bin           with a .idx of the same name: Megatron-LM's indexed dataset, whose index has the documents' places;
                   else as llm.c writes it (a header of 1 KiB), or uint16 without a header, as nanoGPT does
    .u16 .u32      uint16 or uint32 without a header

All are little-endian and mapped, never read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from parallel3d.data.token_file import TokenFile, open_token_file
from parallel3d.errors import DataError, shorten

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "<u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
LLM_C_VERSIONS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Format by magic number and version: of GPT-2's tokens, and of Llama 3's."""
LLM_C_HEADER_BYTES = 1024
MAX_NPY_HEADER_BYTES = 10_000


def open_tokens(path: Path) -> TokenFile:
    """Opens a file of tokens by its suffix; raises DataError with the file's name and what is wrong with it."""
    try:
        return _OPENERS.get(path.suffix, open_token_file)(path)
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror or error})") from error


def index_of(path: Path) -> Path | None:
    """The file with the documents' places that belongs to a .bin file, if there is one."""
    index = path.with_suffix(".idx")
    return index if path.suffix == ".bin" and index.is_file() else None


def _open_npy(path: Path) -> TokenFile:
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read_header(file, max_header_size=MAX_NPY_HEADER_BYTES)
        except (ValueError, KeyError) as error:
            raise DataError(f"{path}: not a readable .npy file ({shorten(str(error))})") from error
        offset = file.tell()
    if len(shape) != 1 or dtype.kind not in "ui" or dtype.byteorder == ">" or dtype.itemsize > 8 or dtype == "<u8":
        raise DataError(
            f"{path}: {dtype} of shape {shape}; tokens must be of one dimension, in uint16, uint32 or another type of"
            " whole numbers up to int64, little-endian"
        )
    return _of_size(path, dtype, offset, shape[0])


def _open_bin(path: Path) -> TokenFile:
    index = index_of(path)
    if index is not None:
        return _open_megatron(path, index)
    with path.open("rb") as file:
        magic, version, num_tokens = (int.from_bytes(file.read(4), "little", signed=True) for _ in range(3))
    if (magic, version) in LLM_C_VERSIONS:
        return _of_size(path, np.dtype(LLM_C_VERSIONS[magic, version]), LLM_C_HEADER_BYTES, num_tokens)
    return _open_raw(path, np.dtype("<u2"))


def _open_raw(path: Path, dtype: np.dtype) -> TokenFile:
    num_tokens, rest = divmod(path.stat().st_size, dtype.itemsize)
    if rest:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes, not a multiple of the {dtype.itemsize} of a token")
    return TokenFile(path=path, dtype=dtype, data_offset=0, num_tokens=num_tokens, metadata={})


def _of_size(path: Path, dtype: np.dtype, offset: int, num_tokens: int, said_by: str = "header") -> TokenFile:
    if num_tokens < 0:
        raise DataError(f"{path}: damaged: its {said_by} says {num_tokens:,} tokens")
    size, needed = path.stat().st_size, offset + num_tokens * dtype.itemsize
    if size < needed:
        num_whole = max(size - offset, 0) // dtype.itemsize
        raise DataError(
            f"{path}: truncated: {size:,} bytes, its {said_by} says {needed:,}: only {num_whole:,} of"
            f" {num_tokens:,} tokens are whole"
        )
    return TokenFile(path=path, dtype=dtype, data_offset=offset, num_tokens=num_tokens, metadata={})


def _open_megatron(path: Path, index: Path) -> TokenFile:
    """The index: magic, version (8 bytes), code of the format (1), numbers of sequences n and of documents' bounds m
    (8 each), sizes (n, 4 each), offsets in bytes (n, 8 each), first sequences of the documents and their end (m, 8
    each)."""
    size = index.stat().st_size
    with index.open("rb") as file:
        magic, head = file.read(len(MEGATRON_MAGIC)), file.read(25)
    if magic != MEGATRON_MAGIC or len(head) < 25:
        raise DataError(f"{index}: not the index of a Megatron-LM dataset, or truncated")
    version, code = int.from_bytes(head[:8], "little"), head[8]
    if version != 1 or code not in MEGATRON_DTYPES:
        kinds = ", ".join(map(str, MEGATRON_DTYPES))
        raise DataError(f"{index}: version {version}, format {code}; version 1 and the formats {kinds} can be read")
    num_sequences, num_bounds = (int.from_bytes(head[at : at + 8], "little") for at in (9, 17))
    begin = len(MEGATRON_MAGIC) + len(head)
    if size < begin + 12 * num_sequences + 8 * num_bounds:
        needs = f"{num_sequences:,} sequences and {num_bounds:,} bounds of documents"
        raise DataError(f"{index}: truncated, or its header is damaged: {size:,} bytes for {needs}")
    sizes = np.fromfile(index, "<i4", num_sequences, offset=begin)
    offsets = np.fromfile(index, "<i8", num_sequences, offset=begin + 4 * num_sequences)
    bounds = np.fromfile(index, "<i8", num_bounds, offset=begin + 12 * num_sequences)
    dtype = np.dtype(MEGATRON_DTYPES[code])
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if problem := _index_problem(sizes, offsets, bounds, starts[:-1] * dtype.itemsize):
        raise DataError(f"{index}: {problem}")
    whole = _of_size(path, dtype, 0, int(starts[-1]), "index")
    return TokenFile(
        path=path, dtype=dtype, data_offset=0, num_tokens=whole.num_tokens, metadata={}, bounds=starts[bounds]
    )


def _index_problem(
    sizes: np.ndarray, offsets: np.ndarray, bounds: np.ndarray, expected_offsets: np.ndarray
) -> str | None:
    """Returns what is wrong with an index of Megatron-LM, naming its first bad entry, counted from 0."""
    if (sizes < 0).any():
        bad = int(np.argmax(sizes < 0))
        return f"damaged: sequence {bad:,} (from 0) has {sizes[bad]:,} tokens"
    if not len(bounds) or bounds[0] != 0:
        return f"damaged: document 0 {f'begins at sequence {bounds[0]:,}, not 0' if len(bounds) else 'is missing'}"
    is_bad = (np.diff(bounds) < 0) | (bounds[1:] > len(sizes))
    if is_bad.any():
        bad = int(np.argmax(is_bad))
        span = f"begins at sequence {bounds[bad]:,} and ends before {bounds[bad + 1]:,}, of {len(sizes):,}"
        return f"damaged: document {bad:,} (from 0) {span}"
    if bounds[-1] != len(sizes):
        return f"damaged: its documents end before sequence {bounds[-1]:,} (from 0) of {len(sizes):,}"
    if (offsets != expected_offsets).any():
        bad = int(np.argmax(offsets != expected_offsets))
        return (
            f"sequence {bad:,} (from 0) begins at byte {offsets[bad]:,} of the .bin file, and those before it end at"
            f" {expected_offsets[bad]:,}: damaged, or not merged: merge it again"
        )
    return None


_OPENERS: Mapping[str, Callable[[Path], TokenFile]] = {
    ".npy": _open_npy,
    ".bin": _open_bin,
    ".u16": lambda path: _open_raw(path, np.dtype("<u2")),
    ".u32": lambda path: _open_raw(path, np.dtype("<u4")),
}
TOKEN_SUFFIXES = (".safetensors", *_OPENERS)
