"""Makes a corpus of files that were tokenised before, by prepare or by others: finds the documents, counts tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.comm.abort import AbortToken
from parallel3d.config.data import TokenizerConfig
from parallel3d.data.fingerprint import fingerprint
from parallel3d.data.places import SPLITS, load_split, write_places, write_split
from parallel3d.data.recipe import FORMAT_VERSION, Recipe
from parallel3d.data.text_corpus import entropy
from parallel3d.data.token_file import TokenFile, open_token_file, scan_tokens
from parallel3d.data.tokenizer import MODEL_FILE, ByteTokenizer, SentencePieceTokenizer
from parallel3d.errors import DataError


def build_tokens(recipe: Recipe, folder: Path, token: AbortToken) -> dict[str, Any]:
    """Fills `folder` with the places of the documents, and returns what is known of them."""
    files = [open_token_file(file.path) for file in recipe.files]
    kind, model = _tokenizer(recipe, files)
    eos_id = _eos_id(recipe.tokenizer, files, kind, model)
    assert recipe.tokenizer.vocab_size is not None, "the configuration is resolved"
    counts, others = np.zeros((2, recipe.tokenizer.vocab_size), np.int64)
    kept = {number for number, file in enumerate(recipe.files) if file.format == "tokens for validation"}
    rows = _rows(files, set(range(len(files))) - kept, eos_id, counts, token)
    if not write_split(folder, rows, 0.0 if kept else recipe.validation_fraction):
        raise DataError(f"there are no tokens to train on in data.sources ({recipe.files[0].path} first)")
    if kept:
        write_places(folder / SPLITS["validation"], _rows(files, kept, eos_id, others, token))
    (folder / MODEL_FILE).write_bytes(model)
    train = load_split(folder)["train"]
    own = {file.metadata["fingerprint"] for file in files if "fingerprint" in file.metadata}
    computed = fingerprint(
        settings=[FORMAT_VERSION, recipe.validation_fraction, eos_id],
        files=[file.path for file in files],
        places=[folder / name for name in SPLITS.values()],
        model=b"",
    )
    return {
        "files": [{"path": str(file.path), "format": file.format} for file in recipe.files],
        "eos_id": eos_id,
        "document_chars": _number(files[0], "document_chars", 0),
        "tokenizer": kind,
        "vocab_size": _number(files[0], "vocab_size", recipe.tokenizer.vocab_size),
        "unigram_entropy": entropy(counts),
        "num_train_tokens": int(train[:, 2].sum()) + len(train),
        "counts_are_exact": True,
        "fingerprint": own.pop() if len(own) == 1 and kept else computed,
    }


def _rows(
    files: Sequence[TokenFile], wanted: set[int], eos_id: int, counts: np.ndarray, token: AbortToken
) -> Iterator[np.ndarray]:
    """Yields the places of the documents of the wanted files, some at a time; adds to `counts` (scan_tokens)."""
    for number in sorted(wanted):
        for block in scan_tokens(files[number], eos_id, counts):
            token.check()
            yield np.insert(block, 0, number, axis=1)


def _tokenizer(recipe: Recipe, files: Sequence[TokenFile]) -> tuple[str | None, bytes]:
    """Kind and model of the tokenizer that made the files, as far as they or the configuration say: else None, b""."""
    beside = files[0].path.parent / MODEL_FILE
    path = Path(recipe.tokenizer.path).expanduser() if recipe.tokenizer.path is not None else beside
    kinds = {file.metadata["tokenizer"] for file in files if "tokenizer" in file.metadata}
    if len(kinds) > 1 or (recipe.tokenizer.kind == "bytes" and "sentencepiece" in kinds):
        raise DataError(f"{files[0].path}: tokens of {' and '.join(sorted(kinds))}: see data.tokenizer.kind")
    if recipe.tokenizer.kind == "bytes" or kinds == {"bytes"}:
        return "bytes", b""
    return ("sentencepiece", path.read_bytes()) if path.is_file() else (None, b"")


def _eos_id(settings: TokenizerConfig, files: Sequence[TokenFile], kind: str | None, model: bytes) -> int:
    """The id that ends documents; DataError where nobody says it, or they say different ones."""
    said = {str(file.path): _number(file, "eos_id", 0) for file in files if "eos_id" in file.metadata}
    if settings.eos_id is not None:
        said["data.tokenizer.eos_id"] = settings.eos_id
    if not said and kind is not None:
        said["the tokenizer"] = ByteTokenizer.eos_id if kind == "bytes" else SentencePieceTokenizer(model).eos_id
    if len(set(said.values())) > 1:
        raise DataError(
            "the id that ends documents differs: " + ", ".join(f"{id} in {who}" for who, id in said.items())
        )
    if not said:
        raise DataError(
            f"{files[0].path} does not say which id ends a document: set data.tokenizer.eos_id (GPT-2's is 50256)"
        )
    return next(iter(said.values()))


def _number(file: TokenFile, name: str, default: int) -> int:
    """What a file's metadata say."""
    try:
        return int(file.metadata.get(name, default))
    except ValueError as error:
        raise DataError(f"{file.path}: its metadata say {name} = {file.metadata[name]!r}, no number") from error
