"""Makes a corpus of text: finds the documents, trains the tokenizer, counts tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from parallel3d.data.columns import extract_text, is_readable_in_place
from parallel3d.data.compressed import extract_documents
from parallel3d.data.conversation_files import READABLE, extract_conversations
from parallel3d.data.corpus_spec import FORMAT_VERSION, CorpusSpec
from parallel3d.data.document_index import blocks, load_split, split_files, write_split
from parallel3d.data.fingerprint import fingerprint
from parallel3d.data.formats import ConversationLines, DocumentSet, build_formats
from parallel3d.data.hf_loader import KIND, TOKENIZER_JSON, train_byte_level
from parallel3d.data.own_format import extract_own
from parallel3d.data.sources import COMPRESSIONS, OWN_FORMAT, SourceFile
from parallel3d.data.tokenizer import MODEL_FILE, ByteTokenizer, SentencePieceTokenizer, Tokenizer, train_tokenizer
from parallel3d.data.tokenizer_files import open_tokenizer, save_tokenizer
from parallel3d.errors import DataError
from parallel3d.parallel.abort import AbortToken

CHUNK_BYTES, MAX_CHUNKS = 2048, 1536  # the tokenizer is trained on at most 3 MB, in well under a second
EXACT_BYTES = 32 * 2**20  # tokens of smaller corpora are all counted (5 s), of larger ones on a sample of this size
LOG_INTERVAL_S = 15.0


def build_text_corpus(spec: CorpusSpec, folder: Path, token: AbortToken, log: Callable[[str], None]) -> dict[str, Any]:
    """Fills `folder` with the corpus, and returns the contents of corpus.json."""
    formats = build_formats(text_column=spec.text_column, document_chars=spec.document_chars, chat=spec.chat)
    scan = _DocumentScan(spec, folder, token, log)
    num_training = write_split(
        folder,
        scan.rows(),
        validation_fraction=spec.validation_fraction,
        test_fraction=spec.test_fraction,
        held_out_files=spec.held_out_files,
    )
    if not num_training:
        others = f" and {len(spec.files) - 1} more" if len(spec.files) > 1 else ""
        raise DataError(f"data.sources has no text: {spec.files[0].path}{others}")
    train = DocumentSet(files=scan.files, formats=formats, document_index=load_split(folder)["train"])
    tokenizer = _tokenizer(spec, train, log)
    save_tokenizer(tokenizer, folder)
    _check_eos(spec, tokenizer)
    counts, share = count_tokens(train, tokenizer, token)
    chat = [] if spec.chat is None else [spec.chat]
    return {
        "files": [{"path": _inside(folder, file.path), "format": file.format} for file in scan.files],
        "text_column": spec.text_column,
        "document_chars": spec.document_chars,
        **({} if spec.chat is None else {"chat": spec.chat}),
        "tokenizer": {"kind": tokenizer.kind, "eos_id": tokenizer.eos_id},
        "vocab_size": tokenizer.vocab_size,
        "unigram_entropy": entropy(counts),
        "num_train_tokens": round(int(counts.sum()) / share),
        "counts_are_exact": share == 1,
        "fingerprint": fingerprint(
            settings=[FORMAT_VERSION, spec.validation_fraction, *identity_of(tokenizer), *chat],
            files=[file.path for file in scan.files],
            document_index=split_files(folder),
            model=tokenizer.files.get(MODEL_FILE) or tokenizer.files.get(TOKENIZER_JSON, b""),
        ),
    }


def identity_of(tokenizer: Tokenizer) -> list[str | int]:
    """Settings that the fingerprint covers beside the tokenizer's file, which for Hugging Face's lacks EOS."""
    return [tokenizer.kind, tokenizer.eos_id] if tokenizer.kind == KIND else [tokenizer.kind]


@dataclass
class _DocumentScan:
    """Reads and checks every byte of the files; unpacks those without random access on the way."""

    spec: CorpusSpec
    folder: Path
    token: AbortToken
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self.files = [self._readable(number, file) for number, file in enumerate(self.spec.files)]

    def rows(self) -> Iterator[np.ndarray]:
        """Yields the positions of all documents, in order, some at a time; logs its progress now and then."""
        num_found, last_log_s = 0, time.monotonic()
        for number, (source, file) in enumerate(zip(self.spec.files, self.files)):
            for block in blocks(self._scan(source, file)):
                self.token.check()
                yield np.insert(block, 0, number, axis=1)
                num_found += len(block)
                if time.monotonic() - last_log_s >= LOG_INTERVAL_S:
                    last_log_s = time.monotonic()
                    self.log(f"indexing: {num_found:,} documents, file {number + 1:,} of {len(self.files):,}")

    def _readable(self, number: int, file: SourceFile) -> SourceFile:
        """The file from which documents are read later."""
        column, is_own = self.spec.text_column, file.format.startswith(OWN_FORMAT)
        if self.spec.chat is not None:
            if file.format not in READABLE and not is_own:
                known = ", ".join(f".{each}" for each in READABLE)
                raise DataError(f"{file.path}: with data.chat all sources must be files of conversations ({known})")
            if file.format == "jsonl" and file.path.suffix not in COMPRESSIONS:
                return file
            return SourceFile(path=self.folder / f"unpacked-{number}.jsonl", format="jsonl")
        is_packed_arrow = file.format == "arrow" and not is_readable_in_place(file.path, column)
        if is_own or file.format in ("parquet", "json") or is_packed_arrow or file.path.suffix in COMPRESSIONS:
            return SourceFile(path=self.folder / f"unpacked-{number}.text", format="text")
        return file

    def _scan(self, source: SourceFile, file: SourceFile) -> Iterator[tuple[int, int]]:
        column, chars = self.spec.text_column, self.spec.document_chars
        formats = build_formats(text_column=column, document_chars=chars, chat=self.spec.chat)
        if source == file:
            try:
                yield from formats[file.format].scan(file.path)
            except OSError as error:
                raise DataError(f"{file.path}: can't be read ({error.strerror})") from error
            return
        with file.path.open("wb") as target:
            layout = None if self.spec.chat is None else cast(ConversationLines, formats[file.format])
            if source.format.startswith(OWN_FORMAT):
                yield from extract_own(source.path, source.format, layout=layout, target=target)
            elif layout is not None:
                yield from extract_conversations(source.path, source.format, layout=layout, target=target)
            elif source.format in ("arrow", "parquet"):
                yield from extract_text(source.path, source.format, column, target)
            else:
                yield from extract_documents(
                    source.path, source.format, text_column=column, document_chars=chars, target=target
                )


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
    """Returns the counts of ids in every n-th document, EOS once per document, and the share of bytes counted."""
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


def _tokenizer(spec: CorpusSpec, train: DocumentSet, log: Callable[[str], None]) -> Tokenizer:
    """The tokenizer in data.tokenizer.path, or one that is trained here."""
    settings = spec.tokenizer
    if settings.kind == "bytes":
        return ByteTokenizer()
    assert settings.vocab_size is not None, "the configuration is resolved"
    if settings.path is None:
        log(f"training a tokenizer of {settings.vocab_size:,} pieces")
        chunks = training_chunks(train)
        if settings.kind == "byte_level_bpe":
            return train_byte_level(chunks, settings.vocab_size)
        return SentencePieceTokenizer(train_tokenizer(chunks, settings.vocab_size))
    tokenizer = open_tokenizer(Path(settings.path).expanduser(), eos_id=settings.eos_id, log=log)
    if tokenizer.vocab_size > settings.vocab_size:
        raise DataError(
            f"{settings.path} has {tokenizer.vocab_size:,} pieces, the model a vocabulary of {settings.vocab_size:,}: "
            f"set model.vocab_size to {tokenizer.vocab_size} or more"
        )
    return tokenizer


def _check_eos(spec: CorpusSpec, tokenizer: Tokenizer) -> None:
    asked = spec.tokenizer.eos_id
    if asked is not None and asked != tokenizer.eos_id:
        raise DataError(
            f"data.tokenizer.eos_id is {asked}, but the tokenizer ends documents with {tokenizer.eos_id}: leave it out "
            "(it is for files of tokens)"
        )


def _inside(folder: Path, path: Path) -> str:
    """Names a file in the corpus' own folder without the folder, which is renamed once complete."""
    return path.name if path.parent == folder else str(path)
