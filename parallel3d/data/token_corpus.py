"""Makes a corpus of files that were tokenised before, by prepare or by others: finds the documents, counts tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.comm.abort import AbortToken
from parallel3d.config.data import TokenizerConfig
from parallel3d.data.fingerprint import fingerprint
from parallel3d.data.places import load_places, select, split, write_places
from parallel3d.data.recipe import FORMAT_VERSION, Recipe
from parallel3d.data.text_corpus import ALL_PLACES, entropy
from parallel3d.data.token_file import TokenFile, open_token_file, scan_tokens
from parallel3d.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
from parallel3d.errors import DataError

TOKENIZER_FILE = "tokenizer.model"


def build_tokens(recipe: Recipe, folder: Path, token: AbortToken) -> dict[str, Any]:
    """Fills `folder` with the places of the documents, and returns what is known of them."""
    files = [open_token_file(file.path) for file in recipe.files]
    kind, model = _tokenizer(recipe, files)
    eos_id = _eos_id(recipe.tokenizer, files, kind, model)
    assert recipe.tokenizer.vocab_size is not None, "the configuration is resolved"
    counts = np.zeros(recipe.tokenizer.vocab_size, np.int64)
    for_validation = [file.format == "tokens for validation" for file in recipe.files]
    write_places(folder / "validation.places", _rows(files, for_validation, eos_id, np.zeros_like(counts), token))
    write_places(folder / "train.places", _rows(files, [not each for each in for_validation], eos_id, counts, token))
    if not load_places(folder / "train.places").size:
        raise DataError(f"there are no tokens to train on in data.sources ({recipe.files[0].path} first)")
    if not any(for_validation):
        _split(folder, recipe.validation_fraction)
    (folder / TOKENIZER_FILE).write_bytes(model)
    train = load_places(folder / "train.places")
    own = {file.metadata["fingerprint"] for file in files if "fingerprint" in file.metadata}
    computed = fingerprint(
        settings=[FORMAT_VERSION, recipe.validation_fraction, eos_id],
        files=[file.path for file in files],
        places=[folder / "train.places", folder / "validation.places"],
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
        "fingerprint": own.pop() if len(own) == 1 and any(for_validation) else computed,
    }


def _rows(
    files: Sequence[TokenFile], wanted: Sequence[bool], eos_id: int, counts: np.ndarray, token: AbortToken
) -> Iterator[np.ndarray]:
    """Yields the places of the documents of the wanted files, some at a time."""
    for number, (file, is_wanted) in enumerate(zip(files, wanted)):
        for block in scan_tokens(file, eos_id, counts) if is_wanted else ():
            token.check()
            yield np.insert(block, 0, number, axis=1)


def _split(folder: Path, validation_fraction: float) -> None:
    """Takes documents for validation out of those for training."""
    (folder / "train.places").rename(folder / ALL_PLACES)
    places = load_places(folder / ALL_PLACES)
    for name, indices in zip(("train", "validation"), split(len(places), validation_fraction)):
        write_places(folder / f"{name}.places", select(places, indices))
    (folder / ALL_PLACES).unlink()


def _tokenizer(recipe: Recipe, files: Sequence[TokenFile]) -> tuple[str | None, bytes]:
    """Kind and model of the tokenizer that made the files, as far as they or the configuration say: else None, b""."""
    beside = files[0].path.parent / TOKENIZER_FILE
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
