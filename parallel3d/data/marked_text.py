"""Text of which only parts are targets, and its tokens: one that is not a target is stored as ~id, which is negative.

So lanes, blends and caches move whether a token is a target together with the token. A loader takes them apart:

    stored    ~5  ~9   7   8  ~5   6          ~ prompt
    inputs     5   9   7   8   5
    targets   -1   7   8  -1   6              -1: ignored
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from parallel3d.data.tokenizer import Tokenizer

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

    Each part is encoded for itself: no token is half in a reply, and a reply's tokens are those of its text alone.
    """
    parts: list[np.ndarray] = []
    position = 0
    for begin, end in (*text.targets, (len(text), len(text))):
        if begin > position:
            parts.append(~tokenizer.encode(text[position:begin]))
        if end > begin:
            parts.append(tokenizer.encode(text[begin:end]))
        position = end
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def split_targets(stored: np.ndarray[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, (sequences, length) each, from stored tokens (sequences, length + 1)."""
    ids = np.where(stored < 0, ~stored, stored)
    return ids[:, :-1], np.where(stored[:, 1:] < 0, IGNORED, ids[:, 1:])
