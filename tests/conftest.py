"""Common ground of all tests: one torch thread for each rank, and text that needs neither network nor home folder."""

import pydoc_data.topics

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


class Texts:
    """Documents in memory: the interpreter's own help topics."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def read(self, number):
        return self.texts[number]


class ByteTokenizer:
    """Bytes as tokens, 256 ends a document."""

    vocab_size = 257
    eos_id = 256

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode()


@pytest.fixture(scope="session")
def topics():
    """About 80 real documents."""
    return Texts([pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)])


@pytest.fixture(scope="session")
def byte_tokenizer():
    return ByteTokenizer()
