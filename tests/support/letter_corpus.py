"""Documents of a few letters, and a tokenizer for them."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from parallel3d.data.documents import TokenizedDocuments
from parallel3d.data.lanes import Lanes


class Texts(list):
    """Documents held in memory."""

    def read(self, index):
        return self[index]


@dataclass(frozen=True)
class Characters:
    """A tokenizer of lower-case letters: a = 1, and 0 separates."""

    vocab_size: int = 27
    eos_id: int = 0

    def encode(self, text):
        return np.array([ord(letter) - 96 for letter in text], np.int32)

    def decode(self, ids):
        return "".join(chr(96 + token) for token in ids if token)


corpora = st.lists(st.text("abcxyz", max_size=7), min_size=1, max_size=15).map(Texts)
seeds = st.integers(-(2**63), 2**64)


def lanes_of(texts, seed, num_lanes):
    return Lanes(TokenizedDocuments(Texts(texts), Characters()), seed, num_lanes)


def flat(documents, sequence):
    """The documents `sequence`, end to end, each with its EOS."""
    return np.concatenate([np.append(Characters().encode(documents[index]), np.int32(0)) for index in sequence])
