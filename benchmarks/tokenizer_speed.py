"""Measures tokenizers on one thread: `python benchmarks/tokenizer_speed.py [--text FILE] [--vocab-size 4096]`

Trains each kind on the same text (default: 3 MB of Python's standard library), then encodes all of it in documents of
4,000 characters. Prints the seconds of training and of opening it again, MB of text and tokens per second. The kinds
take turns, and each row is the median of them, since other work on the machine comes and goes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.data.hf_loader import train_byte_level
from parallel3d.data.sources import find_files
from parallel3d.data.tokenizer import SentencePieceTokenizer, Tokenizer, train_tokenizer
from parallel3d.data.tokenizer_files import load_tokenizer, save_tokenizer

MB = 1_000_000
DOCUMENT_CHARS, CHUNK_CHARS = 4000, 2000


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Measure tokenizers on one thread.")
    parser.add_argument("--text", type=Path, help="a file of text (default: 3 MB of the standard library)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="pieces of each")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each kind")
    options = parser.parse_args(arguments)
    text = options.text.read_text() if options.text else built_in_text()
    chunks = [text[start : start + CHUNK_CHARS] for start in range(0, len(text), CHUNK_CHARS)]
    kinds: dict[str, Callable[[], Tokenizer]] = {
        "sentencepiece": lambda: SentencePieceTokenizer(train_tokenizer(chunks, options.vocab_size)),
        "byte_level_bpe": lambda: train_byte_level(chunks, options.vocab_size),
    }
    tokenizers, facts = {}, {}
    for kind, train in kinds.items():
        started = time.perf_counter()
        tokenizers[kind] = train()
        facts[kind] = (time.perf_counter() - started, seconds_to_open(tokenizers[kind]))
    rates: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, tokenizer in tokenizers.items():
            rates[kind].append(rate(tokenizer, text))
    print(f"{len(text.encode()) / MB:.2f} MB of text, {options.rounds} turns")
    print("| kind | pieces | training | opening | MB/s | tokens/s | bytes a token |\n" + "|---" * 7 + "|")
    for kind, tokenizer in tokenizers.items():
        train_s, open_s = facts[kind]
        mb, tokens = (statistics.median(values) for values in zip(*rates[kind]))
        print(
            f"| {kind} | {tokenizer.vocab_size:,} | {train_s:.2f} s | {open_s * 1e3:.0f} ms | {mb:.2f} | {tokens:,.0f} "
            f"| {mb * MB / tokens:.2f} |"
        )


def built_in_text() -> str:
    whole = ""
    for file in find_files([]):
        whole += file.path.read_text(errors="replace")
        if len(whole) > 3 * MB:
            break
    return whole[: 3 * MB]


def seconds_to_open(tokenizer: Tokenizer) -> float:
    """As each process that reads does."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder))
        started = time.perf_counter()
        load_tokenizer(tokenizer.kind, tokenizer.eos_id, Path(folder))
        return time.perf_counter() - started


def rate(tokenizer: Tokenizer, text: str) -> tuple[float, float]:
    """MB and tokens per second of all documents."""
    documents = [text[start : start + DOCUMENT_CHARS] for start in range(0, len(text), DOCUMENT_CHARS)]
    started = time.perf_counter()
    num_tokens = sum(len(tokenizer.encode(document)) for document in documents)
    seconds = time.perf_counter() - started
    return len(text.encode()) / MB / seconds, num_tokens / seconds


if __name__ == "__main__":
    main(sys.argv[1:])
