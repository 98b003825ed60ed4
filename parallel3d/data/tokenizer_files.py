"""Finds out which tokenizer a path holds, and keeps tokenizers in folders: of the cache, and of prepared tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from parallel3d.data.hf_loader import hf_files_of, is_hf_tokenizer, open_hf_tokenizer
from parallel3d.data.tokenizer import MODEL_FILE, ByteTokenizer, SentencePieceTokenizer, Tokenizer
from parallel3d.errors import DataError


def open_tokenizer(
    path: Path, *, eos_id: int | None = None, log: Callable[[str], None] = lambda text: None
) -> Tokenizer:
    """Opens data.tokenizer.path, whose content decides its kind: a Hugging Face folder or tokenizer.json, or a
    SentencePiece model or a folder that has one. `eos_id` is only for Hugging Face's. Raises DataError."""
    try:
        if is_hf_tokenizer(path):
            return open_hf_tokenizer(path, eos_id=eos_id, log=log)
        model = path / MODEL_FILE if path.is_dir() else path
        if not model.is_file():
            raise DataError(
                f"{path}: holds neither tokenizer.json, nor vocab.json and merges.txt, nor {MODEL_FILE}: open it with "
                "transformers' AutoTokenizer, whose save_pretrained writes a tokenizer.json"
            )
        return SentencePieceTokenizer(model.read_bytes(), name=str(path))
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror})") from error


def holds_tokenizer(folder: Path) -> bool:
    """Whether open_tokenizer finds one in a folder."""
    return is_hf_tokenizer(folder) or (folder / MODEL_FILE).is_file()


def files_of(path: Path) -> list[Path]:
    """All files that decide what open_tokenizer returns for an existing `path`."""
    if is_hf_tokenizer(path):
        return hf_files_of(path)
    return [path / MODEL_FILE if path.is_dir() else path]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes its files, of which bytes have none."""
    for name, data in tokenizer.files.items():
        (folder / name).write_bytes(data)


def load_tokenizer(kind: str, eos_id: int, folder: Path) -> Tokenizer:
    """Returns the tokenizer of this kind that save_tokenizer has written."""
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == SentencePieceTokenizer.kind:
        return SentencePieceTokenizer((folder / MODEL_FILE).read_bytes())
    return open_hf_tokenizer(folder, eos_id=eos_id)
