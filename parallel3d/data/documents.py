"""Documents as tokens, which lanes read: from text, or from a file that is already tokenised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from parallel3d.data.marked_text import MarkedText, encode_marked
from parallel3d.data.tokenizer import Tokenizer


class Documents(Protocol):
    """An ordered list of texts (an index, never a slice)."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> str: ...


class TokenDocuments(Protocol):
    """An ordered list of documents as tokens. Reading keeps no state, so any thread or process may do it, in any
    order."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document; no document contains it."""
        ...

    def __len__(self) -> int: ...

    def tokens(self, index: int) -> np.ndarray:
        """Returns the ids of document `index`, int32 (tokens,), without EOS; ~id where a token is not a target."""
        ...


@dataclass(frozen=True)
class TokenizedDocuments:
    """Texts that a tokenizer encodes when they are read."""

    documents: Documents
    tokenizer: Tokenizer

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_id

    def __len__(self) -> int:
        return len(self.documents)

    def tokens(self, index: int) -> np.ndarray:
        text = self.documents.read(index)
        return encode_marked(text, self.tokenizer) if isinstance(text, MarkedText) else self.tokenizer.encode(text)
