"""Tokenises a corpus ahead of training, into a folder that is a source itself: the same lanes, without the work.

    OUT/train.safetensors  OUT/validation.safetensors   one tensor `tokens` each: documents end to end, each with EOS
    OUT/test.safetensors                                ... if the corpus has a test
    OUT/tokenizer.model                                 the SentencePiece model, or
    OUT/tokenizer.json  OUT/tokenizer_config.json ...   the files of Hugging Face's

Processes tokenise parts of about a megabyte, a few parts ahead of the writer, so that only these are in memory. The
folder gets its name once everything is on the disk: an interrupted run leaves nothing under that name.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from parallel3d.data.corpus import Corpus, load_corpus
from parallel3d.data.documents import TokenizedDocuments
from parallel3d.data.sources import TEST_TOKENS, TRAIN_TOKENS, VALIDATION_TOKENS
from parallel3d.data.token_file import TokenWriter
from parallel3d.data.tokenizer_files import save_tokenizer
from parallel3d.errors import DataError

RANGE_BYTES, RANGE_DOCUMENTS = 2**20, 1000
RANGES_AHEAD = 3
"""Parts in progress for each process."""

ProgressCallback = Callable[[int, int], None]
"""Called after each part with its bytes of text and its tokens."""


@dataclass(frozen=True, kw_only=True)
class PrepareResult:
    """Sizes of the folder that was written."""

    num_documents: int
    num_train_tokens: int
    num_validation_tokens: int
    num_test_tokens: int
    num_bytes: int


def prepare(corpus: Corpus, out: Path, *, num_processes: int, progress: ProgressCallback) -> PrepareResult:
    """Writes the tokens of the corpus into the new folder `out`. Raises DataError if it exists or can't be written."""
    if corpus.tokenizer is None or not isinstance(corpus.train, TokenizedDocuments):
        raise DataError("data.sources are tokens already: they can be trained on as they are")
    refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise DataError(f"can't write {out} ({error})") from error
    try:
        prepared = _write_folder(scratch, corpus, num_processes, progress)
        _fsync_folder(scratch)
        scratch.chmod(0o755)  # mkdtemp gives its owner alone access
        scratch.rename(out)
        return prepared
    except BrokenProcessPool as error:
        raise DataError("a process that tokenises was killed (out of memory?): nothing was written") from error
    except OSError as error:
        raise DataError(f"can't write {out} ({error}): nothing was written") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Raises DataError if `out` exists. Also called before a text is indexed, which may take long."""
    if out.exists():
        raise DataError(f"{out} exists: remove it, or give another --out")


def _write_folder(scratch: Path, corpus: Corpus, num_processes: int, progress: ProgressCallback) -> PrepareResult:
    assert corpus.tokenizer is not None
    metadata = {
        "format": "parallel3d tokens",
        "eos_id": str(corpus.train.eos_id),
        "vocab_size": str(corpus.vocab_size),
        "tokenizer": corpus.tokenizer.kind,
        "document_chars": str(corpus.document_chars),
        "fingerprint": corpus.fingerprint,
    }
    splits = {"train": TRAIN_TOKENS, "validation": VALIDATION_TOKENS}
    if len(corpus.test):
        splits["test"] = TEST_TOKENS
    written = {}
    context = multiprocessing.get_context("spawn")  # a fork would inherit locks of threads that it lacks
    with ProcessPoolExecutor(num_processes, context, _init_process) as pool:
        try:
            for split, name in splits.items():
                with TokenWriter(scratch / name, corpus.vocab_size) as writer:
                    for ids, document_range in _tokenised(pool, corpus, split, RANGES_AHEAD * num_processes):
                        writer.append(ids)
                        progress(document_range.num_bytes, len(ids))
                    num_documents = len(getattr(corpus, split))
                    writer.finish({**metadata, "split": split, "num_documents": str(num_documents)})
                written[split] = writer.num_tokens
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    save_tokenizer(corpus.tokenizer, scratch)
    return PrepareResult(
        num_documents=sum(len(getattr(corpus, split)) for split in splits),
        num_train_tokens=written["train"],
        num_validation_tokens=written["validation"],
        num_test_tokens=written.get("test", 0),
        num_bytes=sum((scratch / name).stat().st_size for name in splits.values()),
    )


@dataclass(frozen=True, kw_only=True)
class DocumentRange:
    """Documents that are tokenised at once."""

    split: str
    first: int
    end: int
    num_bytes: int


def plan_document_ranges(split: str, num_bytes: np.ndarray) -> Iterator[DocumentRange]:
    """Cuts documents of these sizes into parts of about RANGE_BYTES, and at most RANGE_DOCUMENTS; pure."""
    first = size = 0
    for number, document_bytes in enumerate(map(int, num_bytes)):
        size += document_bytes
        if size >= RANGE_BYTES or number + 1 - first == RANGE_DOCUMENTS or number + 1 == len(num_bytes):
            yield DocumentRange(split=split, first=first, end=number + 1, num_bytes=size)
            first, size = number + 1, 0


def _tokenised(
    pool: ProcessPoolExecutor, corpus: Corpus, split: str, num_ahead: int
) -> Iterator[tuple[np.ndarray, DocumentRange]]:
    """Yields the ids of each part, in order."""
    ahead: deque[tuple[Future[np.ndarray], DocumentRange]] = deque()
    for document_range in plan_document_ranges(split, getattr(corpus, split).documents.num_bytes):
        ahead.append((pool.submit(_tokenise, corpus.folder, document_range), document_range))
        if len(ahead) > num_ahead:
            future, done = ahead.popleft()
            yield future.result(), done  # bounded: a process that dies breaks the pool
    for future, document_range in ahead:
        yield future.result(), document_range  # bounded: a process that dies breaks the pool


# --- in the processes that tokenise -----------------------------------------------------------------------------------

_open_corpus = lru_cache(maxsize=1)(load_corpus)
"""Sets up a process of the pool, once."""


def _init_process() -> None:
    """Ignores Ctrl-C, which the writer handles, and ends with the writer even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # bounded: by the life of the writer, whose work this process does
    os._exit(1)


def _tokenise(folder: Path, document_range: DocumentRange) -> np.ndarray:
    """The ids of a part's documents, each with its EOS, int32."""
    documents = getattr(_open_corpus(folder), document_range.split)
    eos = np.array([documents.eos_id], np.int32)
    return np.concatenate(
        [piece for index in range(document_range.first, document_range.end) for piece in (documents.tokens(index), eos)]
    )


def _fsync_folder(folder: Path) -> None:
    """Makes the folder's entries durable."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
