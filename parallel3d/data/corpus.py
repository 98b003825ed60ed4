"""A corpus: training and validation documents, their tokenizer and what is known of their tokens.

What is expensive (finding the documents, training the tokenizer, counting tokens) is done once and kept in a folder of
the cache, named by everything that decides it:

    <cache_directory>/<key>.lock       held by the one process that builds, while the others wait
    <cache_directory>/<key>.building/  what it has written so far; a dead builder's is thrown away by the next
    <cache_directory>/<key>/           complete, since it gets its name in one rename
        documents.npy  tokenizer.model  corpus.json

Nothing here knows of ranks: the same files and settings give the same corpus on every host.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

from parallel3d.comm.abort import POLL_S, AbortToken
from parallel3d.config.schema import TokenizerConfig
from parallel3d.data.documents import TokenDocuments, TokenizedDocuments
from parallel3d.data.sources import DocumentSet, Format, SourceFile, build_formats, find_files
from parallel3d.data.tokenizer import SentencePieceTokenizer, Tokenizer, build_tokenizer, train_tokenizer
from parallel3d.errors import DataError

FORMAT_VERSION = 2
MIN_DOCUMENT_CHARS, MAX_DOCUMENT_CHARS = 256, 65_536
DOCUMENTS_PER_LANE = 8
CHUNK_BYTES, MAX_CHUNKS = 2048, 1536  # the tokenizer is trained on at most 3 MB, in well under a second
PATIENCE_S = 30.0  # of waiting for another process before this one says so
EXACT_BYTES = 32 * 2**20  # tokens of smaller corpora are all counted (5 s), of larger ones on a sample of this size


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What training reads, and what its loss is compared with."""

    train: TokenDocuments
    validation: TokenDocuments
    tokenizer: Tokenizer
    unigram_entropy: float
    """Nats a training token (EOS included): the loss of a model that knows the frequencies of the tokens alone."""
    num_train_tokens: int
    """Tokens of one data epoch of training, EOS included."""
    counts_are_exact: bool
    """False where the last two come from every n-th training document."""
    document_chars: int
    """Where plain text was cut; 0: nowhere."""
    fingerprint: str
    """Hash of the text, its order and split, and the tokenizer: equal on every host, wherever the files lie."""


def open_corpus(
    *,
    sources: Sequence[str],
    text_column: str,
    document_chars: int | None,
    validation_fraction: float,
    num_lanes: int,
    tokenizer: TokenizerConfig,
    cache_directory: Path,
    token: AbortToken,
    notice: Callable[[str], None],
) -> Corpus:
    """Returns the corpus of `sources` (none: the built-in one), built first where the cache lacks it.

    Any number of processes may call this at once: one builds, the others wait. `notice` is told what takes time, by the
    builder; a process that waits is silent unless it takes very long.
    Raises DataError for whatever is wrong with the files, EpochEnded once the token is aborted.
    """
    files = find_files(sources)
    stats = [(str(file.path), file.format, file.path.stat()) for file in files]
    if document_chars is None:
        total = sum(stat.st_size for _, _, stat in stats)
        document_chars = choose_document_chars(total, num_lanes, validation_fraction)
    recipe = {
        "format_version": FORMAT_VERSION,
        "files": [(path, kind, stat.st_size, stat.st_mtime_ns) for path, kind, stat in stats],
        "text_column": text_column,
        "document_chars": document_chars,
        "validation_fraction": validation_fraction,
        "tokenizer": _tokenizer_recipe(tokenizer),
        "versions": [sys.version, sentencepiece.__version__],
    }
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    folder = cache_directory.expanduser() / key
    formats = build_formats(text_column=text_column, document_chars=document_chars)
    if not folder.is_dir():
        with _lock(folder.with_suffix(".lock"), token, notice):
            if not folder.is_dir():
                builder = _Builder(files, formats, validation_fraction, tokenizer)
                builder.build(folder, token, notice)
    return _load(folder, formats, validation_fraction, document_chars)


def choose_document_chars(total_bytes: int, num_lanes: int, validation_fraction: float) -> int:
    """Returns where to cut plain text: a power of two, so that small changes of the corpus do not move it.

    Every lane gets several documents, also when they are few; and a document of validation, as long as that leaves
    documents of a few thousand characters.
    """
    for_training = total_bytes // (num_lanes * DOCUMENTS_PER_LANE)
    for_validation = int(total_bytes * validation_fraction / num_lanes) or for_training
    chars = min(for_training, max(for_validation, 4096))
    return 1 << (min(max(chars, MIN_DOCUMENT_CHARS), MAX_DOCUMENT_CHARS).bit_length() - 1)


def split(num_documents: int, validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the training and the validation documents: the latter spread evenly over the corpus.

    At least one document is for validation if the fraction is above 0, and at least one for training.
    """
    wanted = max(1, round(num_documents * validation_fraction)) if validation_fraction > 0 else 0
    num_validation = min(wanted, num_documents - 1)
    validation = (2 * np.arange(num_validation) + 1) * num_documents // max(1, 2 * num_validation)
    return np.setdiff1d(np.arange(num_documents), validation), validation


def training_chunks(documents: DocumentSet) -> Iterator[str]:
    """Yields pieces of 2 kB for the tokenizer to learn from: all of a small corpus, every n-th of a larger one."""
    num_chunks = -(-documents.num_bytes // CHUNK_BYTES)  # of each document
    ends = np.cumsum(num_chunks)
    total = int(ends[-1])
    last, text = -1, b""
    for chunk in range(0, total, -(-total // MAX_CHUNKS)):
        document = int(np.searchsorted(ends, chunk, side="right"))
        if document != last:
            last, text = document, documents.read(document).encode()
        start = (chunk - int(ends[document] - num_chunks[document])) * CHUNK_BYTES
        piece = text[start : start + CHUNK_BYTES].decode(errors="ignore")  # it may end inside a character
        if piece:
            yield piece


def count_tokens(documents: DocumentSet, tokenizer: Tokenizer, token: AbortToken) -> tuple[np.ndarray, float]:
    """Returns how often each id occurs, EOS once a document, in every n-th document; and the share of bytes counted."""
    num_bytes = documents.num_bytes
    step = -(-int(num_bytes.sum()) // EXACT_BYTES)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for index in range(0, len(documents), step):
        token.check()
        counts += np.bincount(tokenizer.encode(documents.read(index)), minlength=len(counts))
        counts[tokenizer.eos_id] += 1
    return counts, float(num_bytes[::step].sum() / num_bytes.sum())


def entropy(counts: np.ndarray) -> float:
    """Returns -sum p ln p of the empirical frequencies, in nats."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


@dataclass(frozen=True)
class _Builder:
    """Writes a corpus folder."""

    files: Sequence[SourceFile]
    formats: Mapping[str, Format]
    validation_fraction: float
    settings: TokenizerConfig

    def build(self, folder: Path, token: AbortToken, notice: Callable[[str], None]) -> None:
        started = time.perf_counter()
        notice(f"first use of this corpus: indexing {len(self.files):,} files, into {folder}")
        scratch = folder.with_suffix(".building")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        documents = DocumentSet.scan(self.files, self.formats)
        if not len(documents):
            raise DataError(f"there is no text in data.sources ({len(self.files)} files, {self.files[0].path} first)")
        train = documents.select(split(len(documents), self.validation_fraction)[0])
        model = self._tokenizer_model(train, notice)
        tokenizer = build_tokenizer(self.settings.kind, model)
        counts, share = count_tokens(train, tokenizer, token)
        facts = {
            "files": [{"path": str(file.path), "format": file.format} for file in self.files],
            "tokenizer": self.settings.kind,
            "unigram_entropy": entropy(counts),
            "num_train_tokens": round(int(counts.sum()) / share),
            "counts_are_exact": share == 1,
            "fingerprint": self._fingerprint(documents, model),
        }
        np.save(scratch / "documents.npy", documents.places)
        (scratch / "tokenizer.model").write_bytes(model)
        (scratch / "corpus.json").write_text(json.dumps(facts, indent=1))
        os.replace(scratch, folder)
        notice(
            f"indexed {len(documents):,} documents, {documents.num_bytes.sum() / 1e6:,.1f} MB, "
            f"{facts['num_train_tokens']:,} training tokens of a vocabulary of {tokenizer.vocab_size:,}, "
            f"in {time.perf_counter() - started:.1f} s; kept for the next run"
        )

    def _tokenizer_model(self, train: DocumentSet, notice: Callable[[str], None]) -> bytes:
        path, vocab_size = self.settings.path, self.settings.vocab_size
        if self.settings.kind == "bytes":
            return b""
        assert vocab_size is not None, "the configuration is resolved"
        if path is None:
            notice(f"training a tokenizer of {vocab_size:,} pieces")
            return train_tokenizer(training_chunks(train), vocab_size)
        model = Path(path).expanduser().read_bytes()
        num_pieces = SentencePieceTokenizer(model, name=path).vocab_size
        if num_pieces > vocab_size:
            raise DataError(
                f"{path} has {num_pieces:,} pieces, the model a vocabulary of {vocab_size:,}: "
                f"set model.vocab_size to {num_pieces} or more"
            )
        return model

    def _fingerprint(self, documents: DocumentSet, model: bytes) -> str:
        digest = hashlib.sha256(json.dumps([FORMAT_VERSION, self.validation_fraction, self.settings.kind]).encode())
        for file in self.files:
            with file.path.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        digest.update(documents.places.tobytes())
        digest.update(model)
        return digest.hexdigest()


def _load(folder: Path, formats: Mapping[str, Format], validation_fraction: float, document_chars: int) -> Corpus:
    facts = json.loads((folder / "corpus.json").read_text())
    documents = DocumentSet(
        files=[SourceFile(path=Path(file["path"]), format=file["format"]) for file in facts.pop("files")],
        formats=formats,
        places=np.load(folder / "documents.npy"),
    )
    train, validation = split(len(documents), validation_fraction)
    tokenizer = build_tokenizer(facts.pop("tokenizer"), (folder / "tokenizer.model").read_bytes())
    return Corpus(
        train=TokenizedDocuments(documents.select(train), tokenizer),
        validation=TokenizedDocuments(documents.select(validation), tokenizer),
        tokenizer=tokenizer,
        document_chars=document_chars,
        **facts,
    )


def _tokenizer_recipe(settings: TokenizerConfig) -> list[object]:
    if settings.path is None:
        return [settings.kind, settings.vocab_size]
    file = Path(settings.path).expanduser()
    if not file.is_file():
        raise DataError(f"data.tokenizer.path: there is no file {settings.path}")
    return [settings.kind, settings.vocab_size, str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]


@contextmanager
def _lock(path: Path, token: AbortToken, notice: Callable[[str], None]) -> Iterator[None]:
    """Holds the file lock at `path`; the system lets go of a dead process's."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise DataError(
            f"can't write the corpus cache ({error}): set data.cache_directory to a folder of yours"
        ) from error
    with file:
        since, told = time.monotonic(), False
        while not _try_lock(file.fileno()):
            if not told and time.monotonic() - since >= PATIENCE_S:
                notice(f"waiting for another process that builds {path.stem}")
                told = True
            token.sleep(POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
