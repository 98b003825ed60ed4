"""Text of which only parts are targets, and its tokens: one that is not a target is stored as ~id, which is negative.

So lanes, blends and caches move whether a token is a target together with the token. A loader takes them apart:

    stored    ~5  ~9   7   8  ~5   6          ~ prompt
    inputs     5   9   7   8   5
    targets   -1   7   8  -1   6              -1: ignored
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from parallel3d.data.tokenizer import Tokenizer
from parallel3d.errors import DataError, shorten

IGNORED = -1
"""A target that has no loss."""

Span = tuple[int, int]
"""Begin and end in characters."""


class MarkedText(str):
    """A text, and the spans of it that are targets, in order."""

    targets: tuple[Span, ...]

    def __new__(cls, text: str, targets: Iterable[Span]) -> MarkedText:
        marked = super().__new__(cls, text)
        marked.targets = tuple(targets)
        return marked


def encode_marked(text: MarkedText, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a text, int32 (tokens,), with ~id where a token is not a target.

    Each part is encoded for itself: no token is half in a reply, and a reply's tokens are those of its text alone. The
    names of special tokens, which a template inserts, become these tokens where the tokenizer has them; EOS at the end
    is left out, since lanes add it. Raises DataError for one before the end.
    """
    special_ids: Mapping[str, int] = getattr(tokenizer, "special_ids", {})
    end = _end_before_eos(text, special_ids, tokenizer.eos_id)
    parts: list[np.ndarray] = []
    position = 0
    for first, last in (*text.targets, (end, end)):
        first, last = min(first, end), min(last, end)
        parts += [~part for part in _encode(text[position:first], special_ids, tokenizer)]
        parts += _encode(text[first:last], special_ids, tokenizer)
        position = last
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def encode_with_special(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text in which the names of special tokens are these tokens, where the tokenizer has them."""
    parts = _encode(text, getattr(tokenizer, "special_ids", {}), tokenizer)
    return [int(token) for part in parts for token in part]


def _encode(text: str, special_ids: Mapping[str, int], tokenizer: Tokenizer) -> list[np.ndarray]:
    names = "|".join(map(re.escape, sorted(special_ids, key=len, reverse=True)))
    pieces = re.split(f"({names})", text) if names else [text]
    return [
        np.array([special_ids[piece]], np.int32) if piece in special_ids else tokenizer.encode(piece)
        for piece in pieces
        if piece
    ]


def _end_before_eos(text: str, special_ids: Mapping[str, int], eos_id: int) -> int:
    """Where the text ends, without an EOS and blanks after it."""
    eos = next((name for name, number in special_ids.items() if number == eos_id), None)
    if eos is None:
        return len(text)
    visible = text.rstrip()
    end = len(visible) - len(eos) if visible.endswith(eos) else len(text)
    if eos in text[:end]:
        raise DataError(
            f"a conversation has {eos} before its end ({shorten(repr(str(text)), 80)}), the token that ends documents: "
            "set data.tokenizer.eos_id to another special token, such as that of <|endoftext|> or <|end_of_text|>"
        )
    return end


def split_targets(stored: np.ndarray[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, (sequences, length) each, from stored tokens (sequences, length + 1)."""
    ids = np.where(stored < 0, ~stored, stored)
    return ids[:, :-1], np.where(stored[:, 1:] < 0, IGNORED, ids[:, 1:])
