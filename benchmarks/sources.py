"""Measures memory and speed of large sources: `python benchmarks/sources.py --size-mb 4000 [--kinds jsonl,arrow,...]`

Writes a file of each kind into a temporary folder, which is removed at the end. A process of its own indexes each file
as a run does on first use, then opens it again and reads 1,024 tokens of 16 lanes, at their start and at nine tenths of
an epoch, as a resumed run does, then reads lanes with one thread. Prints seconds, tokens/s and the peak of resident
memory, pages of mapped files included. The tokens are prepared from --prepare-mb of text, and repeated up to --size-mb.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import multiprocessing
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data.corpus import Corpus, open_corpus
from parallel3d.data.lanes import Cursor, Lanes
from parallel3d.data.prepare import prepare
from parallel3d.data.sources import TRAIN_TOKENS, find_files
from parallel3d.data.token_file import TokenWriter, open_token_file
from parallel3d.parallel.abort import AbortToken

TEXTS = ("txt", "jsonl", "json", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst", "arrow", "parquet", "dataset")
TOKENS = ("safetensors", "npy", "u16", "u32", "megatron", "llm.c")
KINDS = (*TEXTS, *TOKENS)
SUFFIXES = {"dataset": "", "safetensors": "", "megatron": ".bin", "llm.c": ".bin"}
COMPRESS: dict[str, Callable[[Path], Any]] = {
    "gz": partial(gzip.open, mode="wb", compresslevel=1),
    "bz2": partial(bz2.open, mode="wb", compresslevel=1),
    "xz": partial(lzma.open, mode="wb", preset=0),
    "zst": partial(zstandard.open, mode="wb"),
}
DOCUMENT_CHARS = 4000
ROWS_PER_BATCH = 10_000
NUM_LANES, NUM_TOKENS = 16, 1024
MB = 1_000_000


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Measure peak memory and speed of large sources.")
    parser.add_argument("--size-mb", type=int, default=4000, help="MB of text in each file")
    parser.add_argument("--prepare-mb", type=int, default=100, help="MB of text that is tokenised ahead")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of " + ", ".join(KINDS))
    parser.add_argument("--directory", help="a disk with room for three files")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of reading each")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prepare-into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        into = options.prepare_into
        print(json.dumps(prepare_into(options.measure, into) if into else measure(options.measure, options.seconds)))
        return
    print("| source | size | first use | peak | opened, start | opened, 9/10 | reads | peak |\n" + "|---" * 8 + "|")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        kinds = options.kinds.split(",")
        part = prepared(Path(folder), options.prepare_mb * MB) if {*kinds} & {*TOKENS} else None
        for kind in kinds:
            made = Path(folder) / "made"
            made.mkdir()
            path = made / f"source{SUFFIXES.get(kind, '.' + kind)}"
            if part is not None and kind in TOKENS:
                write_tokens(kind, path, options.size_mb * MB, part)
            else:
                write(kind, path, options.size_mb * MB)
            report(kind, measure_in_process(path, f"--seconds={options.seconds}"))
            shutil.rmtree(made)


def write(kind: str, path: Path, num_bytes: int) -> None:
    """Writes a file of text."""
    if kind in ("arrow", "parquet", "dataset"):
        write_columns(kind, path, num_bytes)
        return
    name, _, packed = kind.partition(".")
    with COMPRESS[packed](path) if packed else path.open("wb") as file:
        for number, text in enumerate(texts(num_bytes)):
            if name == "json":
                file.write(b",\n" if number else b"[")
            line = text if name == "txt" else json.dumps({"text": text}) + "\n" * (name == "jsonl")
            file.write(line.encode())
        file.write(b"]" if name == "json" else b"")


def prepared(folder: Path, num_bytes: int) -> Path:
    """The folder that launch/prepare.py makes of text."""
    source, part = folder / "for-tokens.parquet", folder / "part"
    write("parquet", source, num_bytes)
    print(f"prepare, one process: {measure_in_process(source, f'--prepare-into={part}')}", file=sys.stderr)
    source.unlink()
    return part


def write_tokens(kind: str, path: Path, num_bytes: int, part: Path) -> None:
    """Writes the documents of a prepared folder, repeated up to `num_bytes`."""
    tokens = open_token_file(part / TRAIN_TOKENS)
    ids = tokens.read(0, tokens.num_tokens)
    repeats = -(-num_bytes // (len(ids) * (4 if kind == "u32" else 2)))
    if kind == "safetensors":
        shutil.copytree(part, path)
        (path / TRAIN_TOKENS).unlink()
        with TokenWriter(path / TRAIN_TOKENS, int(tokens.metadata["vocab_size"])) as writer:
            for _ in range(repeats):
                writer.append(ids)
            writer.finish(tokens.metadata)
        return
    with path.open("wb") as file:
        write_head(kind, file, repeats * len(ids))
        for _ in range(repeats):
            file.write(ids.astype("<u4" if kind == "u32" else "<u2").tobytes())
    if kind == "megatron":
        write_index(path.with_suffix(".idx"), ids, int(tokens.metadata["eos_id"]), repeats)


def write_head(kind: str, file: IO[bytes], num_tokens: int) -> None:
    """Writes what stands before the tokens."""
    if kind == "npy":
        facts = {"descr": "<u2", "fortran_order": False, "shape": (num_tokens,)}
        np.lib.format.write_array_header_1_0(file, facts)
    if kind == "llm.c":
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, num_tokens
        file.write(header.tobytes())


def write_index(path: Path, ids: np.ndarray, eos_id: int, repeats: int) -> None:
    """Writes the index of Megatron-LM's documents, each with its end."""
    sizes = np.tile(np.diff(np.flatnonzero(ids == eos_id) + 1, prepend=0), repeats)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * 2
    bounds = np.arange(len(sizes) + 1)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(bounds))
    arrays = (sizes.astype("<i4"), starts.astype("<i8"), bounds.astype("<i8"))
    path.write_bytes(head + b"".join(array.tobytes() for array in arrays))


def write_columns(kind: str, path: Path, num_bytes: int) -> None:
    """Writes a table with one column; a dataset as `save_to_disk` does, in streams of at most 500 MB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("text", pa.string())])
    if kind == "dataset":
        path.mkdir()
        share = -(-num_bytes // (count_parts := -(-num_bytes // (500 * MB))))
        names = [f"data-{number:05}-of-{count_parts:05}.arrow" for number in range(count_parts)]
        for name in names:
            write_rows(pa.ipc.new_stream(path / name, schema), schema, share)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (path / "dataset_info.json").write_text("{}")
        return
    write_rows((pa.ipc.new_file if kind == "arrow" else pq.ParquetWriter)(path, schema), schema, num_bytes)


def write_rows(made: Any, schema: Any, num_bytes: int) -> None:
    import pyarrow as pa

    with made as writer:
        rows: list[str] = []
        for text in texts(num_bytes):
            rows.append(text)
            if len(rows) == ROWS_PER_BATCH:
                writer.write_batch(pa.record_batch([rows], schema=schema))
                rows = []
        if rows:
            writer.write_batch(pa.record_batch([rows], schema=schema))


def texts(num_bytes: int) -> Iterator[str]:
    """Yields numbered pieces of the standard library's text, repeated up to about `num_bytes`."""
    whole = "".join(file.path.read_text(errors="replace") for file in find_files([]))
    written = 0
    for number in count():
        start = number * DOCUMENT_CHARS % (len(whole) - DOCUMENT_CHARS)
        text = f"{number}\n{whole[start : start + DOCUMENT_CHARS]}\n"
        written += len(text.encode())
        yield text
        if written >= num_bytes:
            return


def report(kind: str, found: dict[str, float]) -> None:
    print(
        f"| {kind} | {found['size_mb']:,.0f} MB | {found['index_s']:.1f} s | {found['index_peak_mb']:,.0f} MB | "
        f"{found['start_s']:.2f} s | {found['late_s']:.2f} s | {found['tokens_per_s']:,.0f} tokens/s | "
        f"{found['read_peak_mb']:,.0f} MB |",
        flush=True,
    )


def measure_in_process(path: Path, *options: str) -> dict[str, float]:
    """Runs in a process of its own, whose peak is that of its work alone."""
    command = [sys.executable, __file__, f"--measure={path}", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def measure(path: Path, seconds: float) -> dict[str, float]:
    """Indexes a source, opens it again, reads lanes of it."""
    size_mb = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file()) / MB
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        started = time.perf_counter()
        open_source([str(path)], Path(cache))
        index_s, index_peak_mb = time.perf_counter() - started, peak_mb()
        start_s, late_s = (resume_s([str(path)], Path(cache), share) for share in (0.0, 0.9))
        train = open_source([str(path)], Path(cache)).train
        num_lanes = min(NUM_LANES, len(train))  # a small file has fewer documents
        lanes = Lanes(train, 1, num_lanes)
        cursors = [Cursor.start()] * num_lanes
        started, num_read = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - started) < seconds:
            for lane in range(num_lanes):
                _, cursors[lane] = lanes.read(lane, cursors[lane], NUM_TOKENS)
                num_read += NUM_TOKENS
    return {
        "size_mb": size_mb,
        "index_s": index_s,
        "index_peak_mb": index_peak_mb,
        "start_s": start_s,
        "late_s": late_s,
        "tokens_per_s": num_read / elapsed,
        "read_peak_mb": peak_mb(),
    }


def resume_s(sources: list[str], cache: Path, share: float) -> float:
    """The seconds in which a known source is opened and each lane read from a share of its first epoch on."""
    started = time.perf_counter()
    train = open_source(sources, cache).train
    num_lanes = min(NUM_LANES, len(train))
    lanes = Lanes(train, 1, num_lanes)
    for lane in range(num_lanes):
        lanes.read(lane, Cursor(0, int(share * len(train) / num_lanes), 0), NUM_TOKENS)
    return time.perf_counter() - started


def prepare_into(source: Path, folder: Path) -> dict[str, float]:
    """Tokenises a source with one process; returns the peaks of memory of that process and of the writer."""
    peaks = [0.0]

    def watch(text_bytes: int, num_tokens: int) -> None:
        peaks.extend(peak_mb(process.pid) for process in multiprocessing.active_children())

    with tempfile.TemporaryDirectory(dir=source.parent) as cache:
        corpus = open_source([str(source)], Path(cache))
        started = time.perf_counter()
        done = prepare(corpus, folder, num_processes=1, progress=watch)
        seconds = time.perf_counter() - started
    return {
        "tokens_per_s": round((done.num_train_tokens + done.num_validation_tokens) / seconds),
        "writer_peak_mb": round(peak_mb()),
        "tokeniser_peak_mb": round(max(peaks)),
    }


def open_source(sources: list[str], cache: Path) -> Corpus:
    return open_corpus(
        sources=sources,
        text_column="text",
        document_chars=DOCUMENT_CHARS,
        validation_fraction=0.01,
        num_lanes=NUM_LANES,
        tokenizer=TokenizerConfig(vocab_size=4096, eos_id=eos_of(sources[0])),
        cache_directory=cache,
        token=AbortToken(),
        log=lambda text: None,
    )


def eos_of(source: str) -> int | None:
    """The id that ends documents in plain tokens, as in the prepared ones from which they were made."""
    part = Path(source).parent.parent / "part"
    if not source.endswith((".npy", ".u16", ".u32", ".bin")):
        return None
    return int(open_token_file(part / TRAIN_TOKENS).metadata["eos_id"])


def peak_mb(process: int | str = "self") -> float:
    """Peak of resident memory; getrusage's starts with that of its parent process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / MB for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(sys.argv[1:])
