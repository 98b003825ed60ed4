"""Builds a corpus of files that are already tokenised, by prepare or otherwise: indexes documents, counts tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.data.corpus_spec import FORMAT_VERSION, CorpusSpec
from parallel3d.data.document_index import SPLITS, load_split, split_files, write_document_index, write_split
from parallel3d.data.fingerprint import fingerprint
from parallel3d.data.text_corpus import entropy
from parallel3d.data.token_file import TokenFile, scan_tokens
from parallel3d.data.token_formats import open_tokens
from parallel3d.data.tokenizer import ByteTokenizer, Tokenizer
from parallel3d.data.tokenizer_files import holds_tokenizer, open_tokenizer, save_tokenizer
from parallel3d.errors import DataError, shorten
from parallel3d.parallel.abort import AbortToken

NO_EOS = -1
"""No token has this id."""


def build_token_corpus(spec: CorpusSpec, folder: Path, token: AbortToken) -> dict[str, Any]:
    """Fills `folder` with the index of the documents, and returns the contents of corpus.json."""
    files = [open_tokens(file.path) for file in spec.files]
    declared = _declared_eos(spec, files)
    tokenizer = _tokenizer(spec, files, declared)
    eos_id = _eos_id(spec, files, declared, tokenizer)
    assert spec.tokenizer.vocab_size is not None, "the configuration is resolved"
    counts, other_counts = np.zeros((2, spec.tokenizer.vocab_size), np.int64)
    held_out = {
        split: {number for number, file in enumerate(spec.files) if file.format == f"tokens for {split}"}
        for split in ("validation", "test")
    }
    rows = _rows(files, set(range(len(files))).difference(*held_out.values()), eos_id, counts, token, spec.needs_eos)
    num_training = write_split(
        folder,
        rows,
        validation_fraction=0.0 if held_out["validation"] else spec.validation_fraction,
        test_fraction=0.0 if held_out["test"] else spec.test_fraction,
    )
    if not num_training:
        raise DataError(f"data.sources has no tokens to train on ({spec.files[0].path} first)")
    for split, numbers in held_out.items():
        if numbers:
            rows = _rows(files, numbers, eos_id, other_counts, token, spec.needs_eos)
            write_document_index(folder / SPLITS[split], rows)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    train = load_split(folder)["train"]
    is_prepared = bool(held_out["validation"] and (held_out["test"] or not spec.test_fraction))  # nothing is split here
    own = {file.metadata["fingerprint"] for file in files if "fingerprint" in file.metadata}
    computed = fingerprint(
        settings=[FORMAT_VERSION, spec.validation_fraction, eos_id],
        files=[file.path for file in files],
        document_index=split_files(folder),
        model=b"",
    )
    return {
        "files": [{"path": str(file.path), "format": file.format} for file in spec.files],
        "eos_id": eos_id,
        "document_chars": _number(files[0], "document_chars", 0),
        "tokenizer": tokenizer and {"kind": tokenizer.kind, "eos_id": tokenizer.eos_id},
        "vocab_size": _number(files[0], "vocab_size", spec.tokenizer.vocab_size),
        "unigram_entropy": entropy(counts),
        "num_train_tokens": int(train[:, 2].sum()) + len(train),
        "counts_are_exact": True,
        "fingerprint": own.pop() if len(own) == 1 and is_prepared else computed,
    }


def _rows(
    files: Sequence[TokenFile], wanted: set[int], eos_id: int, counts: np.ndarray, token: AbortToken, needs_eos: bool
) -> Iterator[np.ndarray]:
    """Yields index rows of the documents of the wanted files, some at a time; adds to `counts` (scan_tokens)."""
    for number in sorted(wanted):
        for block in scan_tokens(files[number], eos_id, counts, needs_eos=needs_eos):
            token.check()
            yield np.insert(block, 0, number, axis=1)


def _tokenizer(spec: CorpusSpec, files: Sequence[TokenFile], eos_id: int | None) -> Tokenizer | None:
    """The files' tokenizer: of data.tokenizer.path, or of their folder; None if neither has one."""
    kinds = {file.metadata["tokenizer"] for file in files if "tokenizer" in file.metadata}
    tokenizer: Tokenizer | None = None
    if spec.tokenizer.kind == ByteTokenizer.kind or kinds == {ByteTokenizer.kind}:
        tokenizer = ByteTokenizer()
    elif spec.tokenizer.path is not None or holds_tokenizer(files[0].path.parent):
        path = Path(spec.tokenizer.path).expanduser() if spec.tokenizer.path is not None else files[0].path.parent
        tokenizer = open_tokenizer(path, eos_id=eos_id)
    if len(kinds) > 1 or (tokenizer is not None and kinds - {tokenizer.kind}):
        raise DataError(
            f"{files[0].path}: tokens of {' and '.join(sorted(kinds))} tokenizers: check data.tokenizer.kind"
        )
    return tokenizer


def _declared_eos(spec: CorpusSpec, files: Sequence[TokenFile]) -> int | None:
    """The id that ends documents by the files or the configuration; DataError if they differ."""
    settings = spec.tokenizer
    declared = {str(file.path): _number(file, "eos_id", 0) for file in files if "eos_id" in file.metadata}
    if settings.eos_id is not None:
        declared["data.tokenizer.eos_id"] = settings.eos_id
    if len(set(declared.values())) > 1:
        raise DataError(
            "the id that ends documents differs: " + ", ".join(f"{id} in {who}" for who, id in declared.items())
        )
    return next(iter(declared.values()), None)


def _eos_id(spec: CorpusSpec, files: Sequence[TokenFile], declared: int | None, tokenizer: Tokenizer | None) -> int:
    """The id that ends documents, NO_EOS if none is known or needed."""
    if declared is not None:
        return declared
    if tokenizer is not None:
        return tokenizer.eos_id
    if not spec.needs_eos:
        return NO_EOS
    raise DataError(
        f"{files[0].path} doesn't record which id ends a document: set data.tokenizer.eos_id (GPT-2's is 50256)"
    )


def _number(file: TokenFile, name: str, default: int) -> int:
    """A number in a file's metadata."""
    try:
        return int(file.metadata.get(name, default))
    except ValueError as error:
        raise DataError(
            f"{file.path}: its metadata has {name} = {shorten(file.metadata[name])!r}, which is not a number"
        ) from error
