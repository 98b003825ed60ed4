"""A hash that identifies a text on any machine, independent of the names and times of its files.

Of a file of up to 16 MiB all bytes count, of a larger one 64 blocks of 256 KiB spread evenly from its first byte to its
last, and its size: reading gigabytes once more would take as long as indexing them. The positions of all documents
count as well. So a change goes unnoticed only if it leaves the size of every document and all 64 blocks of its file as
they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

BLOCK_BYTES, NUM_BLOCKS = 2**18, 64


def fingerprint(*, settings: object, files: Iterable[Path], document_index: Iterable[Path], model: bytes) -> str:
    """Returns the hash of all that determines the tokens: settings (as JSON), files, document index, tokenizer
    model."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    for path in files:
        digest.update(file_digest_of(path))
    for path in document_index:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update(model)
    return digest.hexdigest()


def file_digest_of(path: Path) -> bytes:
    """Returns the hash of a file, or of blocks of a large one."""
    size = path.stat().st_size
    last = size - BLOCK_BYTES
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= BLOCK_BYTES * NUM_BLOCKS:
            digest.update(file.read())
        else:
            for number in range(NUM_BLOCKS):
                file.seek(last * number // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.digest()
