"""Documents within a micro-batch: found by EOS where the tokens are, told to later stages behind the activations.

Sequences are packed: a document ends with EOS, and the next one follows in the same sequence. Attention that must not
cross an EOS needs to know where documents begin. The first stage sees the tokens; the others are told by some rows of
zeros and ones behind the activations that they receive, one number a token, so that no further message travels and the
number of bytes does not depend on the text. The price is a copy of what is sent.

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
    """Lengths of the documents, or of their parts, in input tokens (batch, seq) whose sequences lie end to end.

    An EOS is its document's last token. A sequence's end cuts a document in two: they are strangers to each other.
    """
    is_last = tokens == eos_id
    is_last[:, -1] = True
    return tuple(np.diff(np.flatnonzero(is_last), prepend=-1).tolist())


def num_rows(num_tokens: int, hidden_size: int) -> int:
    """Rows that the marks of a micro-batch take behind its activations."""
    return -(-num_tokens // hidden_size)


def append_document_marks(x: Tensor, documents: tuple[int, ...]) -> Tensor:
    """Activations (tokens_local, hidden) with the marks of all the micro-batch's documents behind them."""
    hidden_size = x.shape[1]
    marks = torch.zeros(num_rows(sum(documents), hidden_size) * hidden_size, dtype=x.dtype)
    marks[[0, *accumulate(documents[:-1])]] = 1
    return torch.cat([x, to_device(marks.view(-1, hidden_size), x.device)])


def split_document_marks(received: Tensor, num_tokens: int) -> tuple[Tensor, tuple[int, ...]]:
    """What `append_document_marks` was given, from what it gave; in the host's memory."""
    num_local = received.shape[0] - num_rows(num_tokens, received.shape[1])
    marks = received[num_local:].view(-1)[:num_tokens]
    begins = [*marks.nonzero().view(-1).tolist(), num_tokens]
    return received[:num_local], tuple(end - begin for begin, end in zip(begins, begins[1:]))
