"""Converts text to token ids and back, without loss. Tokenizers of Hugging Face are in hf_loader.py.

Either the bytes themselves, or a SentencePiece BPE model with identity normalisation and byte fallback: whatever the
text (tabs, newlines, control characters, emoji), decode(encode(text)) == text. Newlines and runs of spaces are ordinary
pieces, so that source code stays short. EOS separates documents and never comes out of encode; no BOS exists. The
same text gives the same ids in every process and thread.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import sentencepiece

from parallel3d.errors import DataError

UNK_ID, EOS_ID = 0, 1
MIN_VOCAB_SIZE = 256 + 2  # every byte, the unknown piece and EOS
MODEL_FILE = "tokenizer.model"
MAX_PIECE_CHARS = 500_000  # longer texts are encoded piece by piece, in order, to bound memory
SPACE = "\u2581"  # SentencePiece's mark for a space: it would decode the character itself as a space


class Tokenizer(Protocol):
    """Maps text to ids below `vocab_size` and back."""

    @property
    def kind(self) -> str:
        """sentencepiece, huggingface or bytes."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """Files that a checkpoint keeps, by name."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 (tokens,), without EOS."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; EOS has none."""
        ...


class SentencePieceTokenizer:
    """A trained SentencePiece model."""

    kind = "sentencepiece"

    def __init__(self, model: bytes, *, name: str = "the tokenizer"):
        """Raises DataError, with `name`, unless `model` is a SentencePiece model with an EOS piece."""
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"{name}: not a SentencePiece model ({error})") from error
        if self._processor.eos_id() < 0:
            raise DataError(f"{name}: has no EOS piece, which separates documents")
        self.files = {MODEL_FILE: model}
        self._space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]

    @property
    def vocab_size(self) -> int:
        return self._processor.vocab_size()

    @property
    def eos_id(self) -> int:
        return self._processor.eos_id()

    def encode(self, text: str) -> np.ndarray:
        ids: list[int] = []
        for start in range(0, len(text), MAX_PIECE_CHARS):
            for number, part in enumerate(text[start : start + MAX_PIECE_CHARS].split(SPACE)):
                ids.extend(self._space_ids if number else ())
                ids.extend(self._processor.encode(part))
        return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(token) for token in ids])


class ByteTokenizer:
    """The bytes of the text in UTF-8, and EOS as the 257th id: no training, no file."""

    kind = "bytes"
    vocab_size = 257
    eos_id = 256
    files: Mapping[str, bytes] = {}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are not valid UTF-8, which a model may generate, become U+FFFD."""
        return bytes(token for token in ids if token < self.eos_id).decode(errors="replace")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Returns a BPE model of at most `vocab_size` pieces: fewer if `texts` are too short for so large a vocabulary.

    `texts` are short (about 2 kB): SentencePiece trains on sentences.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"data.tokenizer.vocab_size = {vocab_size}: must be at least {MIN_VOCAB_SIZE} (bytes, unknown, EOS)"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            byte_fallback=True,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=1 << 16,
            unk_id=UNK_ID,
            eos_id=EOS_ID,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,  # stored in the model, so it is fixed: the same text gives the same bytes everywhere
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            f"can't train a tokenizer of {vocab_size} pieces on this corpus: {error} "
            "Give more text, or another data.tokenizer.vocab_size"
        ) from error
    return model.getvalue()
