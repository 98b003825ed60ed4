"""Converts a SentencePiece BPE model to the files of a Hugging Face fast tokenizer that gives exactly the same ids.

tokenizer.json describes a pipeline of the `tokenizers` library; ours is nothing but BPE with byte fallback, as our
models have no normalisation and no dummy prefix. Two things decide whether the ids are the same for every text:

- SentencePiece writes spaces as U+2581 and would take that character itself for a space, which is why our tokenizer
  encodes it as its three bytes. The vocabulary here is written with plain spaces, so that U+2581 is an unknown
  character like others: three bytes.
- In a text, the names of special pieces (</s>) are ordinary characters. So tokenizer.json has no "added tokens", and
  tokenizer_config.json turns the search for them off (split_special_tokens).

BPE merges the best pair of neighbours whose union is a piece, the leftmost of equals; SentencePiece ranks pieces by
their score, `tokenizers` pairs by their order in a list: all pairs that make a piece, best piece first.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parallel3d.data.tokenizer import MODEL_FILE, SPACE
from parallel3d.errors import DataError

ProtoMessage = dict[int, Any]
"""A protocol buffer's fields by number."""

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = _SUPPORTED_KINDS = (1, 2, 3, 6)
"""Kinds of pieces, as the file numbers them."""
_BPE = 2
_EOS_ID = 42


@dataclass(frozen=True, kw_only=True)
class VocabPiece:
    """One entry of the vocabulary."""

    text: str
    score: float
    kind: int


def hf_tokenizer_files(model: bytes, *, max_length: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json of the same tokenizer; `max_length` is the model's longest sequence.

    Raises DataError for a SentencePiece model that is more than BPE with byte fallback: no file here gives its ids.
    """
    try:
        pieces, trainer, normalizer = parse_model(model)
    except (ValueError, IndexError, struct.error) as error:
        raise DataError(f"{MODEL_FILE} is not a SentencePiece model ({error})") from None
    if reason := _unsupported_feature(pieces, trainer, normalizer):
        raise DataError(f"the tokenizer {reason}, which tokenizer.json can't express")
    unknown = next((piece.text for piece in pieces if piece.kind == _UNKNOWN), None)
    eos_id = trainer.get(_EOS_ID, 2)
    return _files(
        vocab={plain_text(piece): number for number, piece in enumerate(pieces)},
        merges=merges_of(pieces),
        unknown=unknown,
        eos=pieces[eos_id].text if eos_id < len(pieces) else None,
        max_length=max_length,
    )


def hf_byte_tokenizer_files(*, max_length: int) -> dict[str, bytes]:
    """The files of the byte tokenizer: ids 0 to 255 are the bytes of UTF-8, 256 is EOS."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"</s>": 256}
    return _files(vocab=vocab, merges=[], unknown=None, eos="</s>", max_length=max_length)


def _files(
    *, vocab: dict[str, int], merges: list[tuple[str, str]], unknown: str | None, eos: str | None, max_length: int
) -> dict[str, bytes]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "unk_token": unknown,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }
    unset: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    pipeline = {"version": "1.0", **unset, "added_tokens": [], "decoder": decoder, "model": model}
    return {"tokenizer.json": _to_json_bytes(pipeline), "tokenizer_config.json": _to_json_bytes(settings)}


def merges_of(pieces: list[VocabPiece]) -> list[tuple[str, str]]:
    """All pairs of pieces whose union is a piece, in the order in which BPE prefers them."""
    normal = {plain_text(piece): piece.score for piece in pieces if piece.kind == _NORMAL}
    ranked = sorted(normal, key=lambda text: -normal[text])  # stable: equal scores stay in the order of their ids
    cuts = ((text[:cut], text[cut:]) for text in ranked for cut in range(1, len(text)))
    return [(left, right) for left, right in cuts if left in normal and right in normal]


def plain_text(piece: VocabPiece) -> str:
    """A piece's text with spaces as they are."""
    return piece.text.replace(SPACE, " ") if piece.kind == _NORMAL else piece.text


# --- SentencePiece's file: a protocol buffer --------------------------------------------------------------------------


def parse_model(model: bytes) -> tuple[list[VocabPiece], ProtoMessage, ProtoMessage]:
    """The vocabulary by id, and how the model was trained and normalises."""
    entries = (dict(_fields(value)) for number, value in _fields(model) if number == 1)
    pieces = [
        VocabPiece(text=e[1].decode(), score=struct.unpack("<f", e[2])[0] if 2 in e else 0.0, kind=e.get(3, _NORMAL))
        for e in entries
    ]
    parts = dict(_fields(model))
    return pieces, dict(_fields(parts.get(2, b""))), dict(_fields(parts.get(3, b"")))


def _unsupported_feature(pieces: list[VocabPiece], trainer: ProtoMessage, normalizer: ProtoMessage) -> str:
    """The first feature beyond BPE with byte fallback, as the end of a sentence; "" if there is none."""
    checks = (
        (trainer.get(3, 1) != _BPE, "is not BPE"),
        (not trainer.get(35), "has no byte fallback"),
        (bool(trainer.get(24)), "puts spaces at the ends of words"),
        (bool(normalizer.get(2)), "normalises text"),
        (bool(normalizer.get(3, 1)), "puts a space in front"),
        (bool(normalizer.get(4, 1)), "removes spaces"),
        (not normalizer.get(5, 1), "leaves spaces as they are"),
        (any(piece.kind not in _SUPPORTED_KINDS for piece in pieces), "has user-defined pieces"),
    )
    return next((reason for applies, reason in checks if applies), "")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message's fields: integers as such, all else as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = {1: 8, 5: 4}[wire]
        else:
            raise ValueError(f"a field of wire type {wire}")
        if position + length > len(data):
            raise ValueError("it ends early")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """An integer, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def _to_json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
