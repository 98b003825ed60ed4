"""A corpus: documents to train on, to validate with and for a test, their tokenizer and statistics of their tokens.

The expensive parts (indexing the documents, training the tokenizer, counting tokens) are done once and kept in a folder
of the cache, named by a hash of all inputs: <cache_directory>/<key>/ with

    train.places  validation.places     position of each document, memory-mapped (document_index.py)
    test.places                         ... if there is a test
    unpacked-N.text                     text of a source without random access (Parquet, compressed Arrow)
    tokenizer.model                     or tokenizer.json and the files that belong to it
    corpus.json

The key covers the files' paths, sizes and times, so that opening a known corpus reads none of its text. The
fingerprint, by which a checkpoint recognises its text, covers none of these (fingerprint.py). Ranks play no part: the
same files and settings give the same corpus on every host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from parallel3d.config.sections.chat import ChatConfig
from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data.cache import build_once
from parallel3d.data.conversations import load_template
from parallel3d.data.corpus_spec import CorpusSpec, choose_document_chars
from parallel3d.data.document_index import load_split
from parallel3d.data.documents import TokenDocuments, TokenizedDocuments
from parallel3d.data.formats import DocumentSet, build_formats
from parallel3d.data.sources import NO_FORMATS, SourceFile, find_files
from parallel3d.data.text_corpus import build_text_corpus
from parallel3d.data.token_corpus import build_token_corpus
from parallel3d.data.token_file import PackedDocuments
from parallel3d.data.token_formats import open_tokens
from parallel3d.data.tokenizer import Tokenizer
from parallel3d.data.tokenizer_files import load_tokenizer
from parallel3d.parallel.abort import AbortToken


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text of a run, and the reference for its loss."""

    folder: Path
    """Folder in the cache: load_corpus opens it in any process of this host."""
    train: TokenDocuments
    validation: TokenDocuments
    test: TokenDocuments
    """Documents that neither training nor its evaluations read; none without data.test_fraction."""
    train_document_index: np.ndarray
    """int64 (training documents, 3), mapped: number of the file, in the order of data.sources; offset, size."""
    tokenizer: Tokenizer | None
    """None for files of tokens whose tokenizer is unknown."""
    vocab_size: int
    """Ids are below it."""
    unigram_entropy: float
    """Nats per training token (EOS included): the loss of a model that knows only the frequencies of the tokens. If
    validation is a part of files of tokens: over all tokens."""
    num_train_tokens: int
    """Tokens of one epoch of training, EOS included."""
    counts_are_exact: bool
    """False if the last two were estimated from every n-th training document."""
    document_chars: int
    """Length at which plain text was split into documents; 0: not split."""
    fingerprint: str
    """Hash of the text, its order and split, and the tokenizer: the same on every host, for every location of the
    files, and for text that `prepare` has tokenised."""


def open_corpus(
    *,
    sources: Sequence[str],
    text_column: str,
    document_chars: int | None,
    validation_fraction: float,
    test_fraction: float = 0.0,
    num_lanes: int,
    tokenizer: TokenizerConfig,
    chat: ChatConfig | None = None,
    own_formats: Mapping[str, str] = NO_FORMATS,
    needs_eos: bool = True,
    cache_directory: Path,
    token: AbortToken,
    log: Callable[[str], None],
) -> Corpus:
    """Returns the corpus of `sources` (none: the built-in one), built first if the cache lacks it.

    Any number of processes may call this at once: one builds and passes its progress to `log`, the others wait, and log
    only if that takes very long.
    Raises DataError for damaged or unusable files, GenerationEnded once the token is aborted.
    """
    files = find_files(sources, own_formats)
    if document_chars is None:
        total = sum(file.path.stat().st_size for file in files)
        document_chars = choose_document_chars(total, num_lanes, validation_fraction)
    spec = CorpusSpec(
        files=files,
        text_column=text_column,
        document_chars=document_chars,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        tokenizer=tokenizer,
        chat=None if chat is None else load_template(chat.template).to_json(),
        needs_eos=needs_eos,
    )
    folder = cache_directory.expanduser() / spec.cache_key()
    build_once(folder, partial(_build, spec, folder, token, log), token, log)
    return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    """Returns the corpus in `folder` of the cache."""
    facts = json.loads((folder / "corpus.json").read_text())
    files = [SourceFile(path=folder / file["path"], format=file["format"]) for file in facts.pop("files")]
    saved, chat = facts.pop("tokenizer"), facts.pop("chat", None)
    tokenizer = load_tokenizer(saved["kind"], saved["eos_id"], folder) if saved else None
    document_index = load_split(folder)
    documents: dict[str, TokenDocuments]
    if "eos_id" in facts:
        opened, eos_id = [open_tokens(file.path) for file in files], facts.pop("eos_id")
        documents = {
            name: PackedDocuments(files=opened, document_index=rows, eos_id=eos_id)
            for name, rows in document_index.items()
        }
    else:
        assert tokenizer is not None
        formats = build_formats(text_column=facts.pop("text_column"), document_chars=facts["document_chars"], chat=chat)
        documents = {
            name: TokenizedDocuments(DocumentSet(files=files, formats=formats, document_index=rows), tokenizer)
            for name, rows in document_index.items()
        }
    return Corpus(
        folder=folder,
        tokenizer=tokenizer,
        train=documents["train"],
        validation=documents["validation"],
        test=documents["test"],
        train_document_index=document_index["train"],
        **facts,
    )


def _build(spec: CorpusSpec, folder: Path, token: AbortToken, log: Callable[[str], None], scratch: Path) -> None:
    """Fills `scratch`, which is then renamed to `folder`."""
    started = time.perf_counter()
    num_files = len(spec.files)
    log(f"first use of this corpus: indexing {num_files:,} file{'s' if num_files != 1 else ''}, into {folder}")
    facts = build_token_corpus(spec, scratch, token) if spec.is_tokens else build_text_corpus(spec, scratch, token, log)
    (scratch / "corpus.json").write_text(json.dumps(facts, indent=1))
    splits = load_split(scratch).values()
    size = sum(int(rows[:, 2].sum()) for rows in splits)
    amount = f"{size:,} tokens" if spec.is_tokens else f"{size / 1e6:,.1f} MB"
    log(
        f"indexed {sum(map(len, splits)):,} documents, {amount}, "
        f"{facts['num_train_tokens']:,} training tokens of a vocabulary of {facts['vocab_size']:,}, "
        f"in {time.perf_counter() - started:.1f} s; kept for the next run"
    )
