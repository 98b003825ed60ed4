"""Measures memory and speed of large sources: `python benchmarks/sources.py --size-mb 4000 [--kinds jsonl,arrow,...]`

Writes a file of each kind into a temporary folder, which is removed at the end. A process of its own indexes each file
as a run does on first use, then reads lanes of it with one thread. Prints seconds, tokens/s and the peak of resident
memory, pages of mapped files included. The tokens are prepared from --prepare-mb of text, and repeated up to --size-mb.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data.corpus import Corpus, open_corpus
from parallel3d.data.lanes import Cursor, Lanes
from parallel3d.data.prepare import prepare
from parallel3d.data.sources import TRAIN_TOKENS, find_files
from parallel3d.data.token_file import TokenWriter, open_token_file
from parallel3d.parallel.abort import AbortToken

KINDS = ("text", "jsonl", "arrow", "parquet", "tokens")
SUFFIXES = {"text": ".txt", "tokens": ""}
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
    print("| source | size | first use | peak memory | opened again | reads | peak memory |\n" + "|---" * 7 + "|")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for kind in options.kinds.split(","):
            path = Path(folder) / f"source{SUFFIXES.get(kind, '.' + kind)}"
            if kind == "tokens":
                write_tokens(path, options.size_mb * MB, options.prepare_mb * MB)
            else:
                write(kind, path, options.size_mb * MB)
            report(kind, measure_in_process(path, f"--seconds={options.seconds}"))
            path.unlink() if path.is_file() else shutil.rmtree(path)


def write(kind: str, path: Path, num_bytes: int) -> None:
    """Writes a file of text."""
    if kind in ("arrow", "parquet"):
        write_columns(kind, path, num_bytes)
        return
    with path.open("w") as file:
        for text in texts(num_bytes):
            file.write(text if kind == "text" else json.dumps({"text": text}) + "\n")


def write_tokens(folder: Path, num_bytes: int, prepare_bytes: int) -> None:
    """Writes a folder as launch/prepare.py does, with repeated documents."""
    source, part = folder.with_name("for-tokens.parquet"), folder.with_name("part")
    write("parquet", source, prepare_bytes)
    print(f"prepare, one process: {measure_in_process(source, f'--prepare-into={part}')}", file=sys.stderr)
    source.unlink()
    tokens = open_token_file(part / TRAIN_TOKENS)
    ids = tokens.read(0, tokens.num_tokens)
    part.rename(folder)
    with TokenWriter(folder / TRAIN_TOKENS, int(tokens.metadata["vocab_size"])) as writer:
        while writer.num_tokens * tokens.dtype.itemsize < num_bytes:
            writer.append(ids)
        writer.finish(tokens.metadata)


def write_columns(kind: str, path: Path, num_bytes: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("text", pa.string())])
    make = pa.ipc.new_file if kind == "arrow" else pq.ParquetWriter
    with make(path, schema) as writer:
        rows: list[str] = []
        for text in texts(num_bytes):
            rows.append(text)
            if len(rows) == ROWS_PER_BATCH:
                writer.write_batch(pa.record_batch([rows], schema=schema))
                rows = []
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
        f"{found['open_s']:.2f} s | {found['tokens_per_s']:,.0f} tokens/s | {found['read_peak_mb']:,.0f} MB |",
        flush=True,
    )


def measure_in_process(path: Path, *options: str) -> dict[str, float]:
    """Runs in a process of its own, whose peak is that of its work alone."""
    command = [sys.executable, __file__, f"--measure={path}", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def measure(path: Path, seconds: float) -> dict[str, float]:
    """Indexes a source, opens it again, reads lanes of it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        started = time.perf_counter()
        open_source([str(path)], Path(cache))
        index_s, index_peak_mb = time.perf_counter() - started, peak_mb()
        started = time.perf_counter()
        corpus = open_source([str(path)], Path(cache))
        open_s = time.perf_counter() - started
        lanes = Lanes(corpus.train, 1, NUM_LANES)
        cursors = [Cursor.start()] * NUM_LANES
        started, num_read = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - started) < seconds:
            for lane in range(NUM_LANES):
                _, cursors[lane] = lanes.read(lane, cursors[lane], NUM_TOKENS)
                num_read += NUM_TOKENS
    return {
        "size_mb": sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path])) / MB,
        "index_s": index_s,
        "index_peak_mb": index_peak_mb,
        "open_s": open_s,
        "tokens_per_s": num_read / elapsed,
        "read_peak_mb": peak_mb(),
    }


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
        tokenizer=TokenizerConfig(vocab_size=4096),
        cache_directory=cache,
        token=AbortToken(),
        log=lambda text: None,
    )


def peak_mb(process: int | str = "self") -> float:
    """Peak of resident memory; getrusage's starts with that of its parent process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / MB for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(sys.argv[1:])
