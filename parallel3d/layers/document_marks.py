"""Documents within a micro-batch: the first stage finds them by EOS, later stages get them with the activations.

Sequences are packed: a document ends with EOS, and the next one follows in the same sequence. Attention that must not
cross an EOS needs to know where documents begin. The first stage sees the tokens. The others receive rows of zeros and
ones after the activations, one number a token: no further message is needed, and the number of bytes does not depend on
the text. The cost is a copy of the activations that are sent.

    x (tokens_local, hidden)      rows of the activations
    1 0 0 0 1 0 0 0 0 0 0 1 ...   1 where a document begins, for all tokens of the micro-batch; zeros to fill the row
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from parallel3d.parallel.staged_group import to_device


def document_lengths(tokens: np.ndarray, eos_id: int) -> tuple[int, ...]:
    """Lengths of the documents, or of their parts, in input tokens (batch, seq), sequence after sequence.

    An EOS is its document's last token. A sequence's end also ends a document; the rest of it counts as another one.
    """
    is_last = tokens == eos_id
    is_last[:, -1] = True
    return tuple(np.diff(np.flatnonzero(is_last), prepend=-1).tolist())


def num_rows(num_tokens: int, hidden_size: int) -> int:
    """Rows that the marks of a micro-batch take after its activations."""
    return -(-num_tokens // hidden_size)


def append_document_marks(x: Tensor, documents: tuple[int, ...]) -> Tensor:
    """Appends the marks of all documents of the micro-batch to its activations (tokens_local, hidden)."""
    hidden_size = x.shape[1]
    marks = torch.zeros(num_rows(sum(documents), hidden_size) * hidden_size, dtype=x.dtype)
    marks[[0, *accumulate(documents[:-1])]] = 1
    return torch.cat([x, to_device(marks.view(-1, hidden_size), x.device)])


def split_document_marks(received: Tensor, num_tokens: int) -> tuple[Tensor, tuple[int, ...]]:
    """Splits the result of `append_document_marks`, in host memory, into activations and document lengths."""
    num_local = received.shape[0] - num_rows(num_tokens, received.shape[1])
    marks = received[num_local:].view(-1)[:num_tokens]
    begins = [*marks.nonzero().view(-1).tolist(), num_tokens]
    return received[:num_local], tuple(end - begin for begin, end in zip(begins, begins[1:]))
