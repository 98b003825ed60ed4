"""Tokenizers as Hugging Face folders hold them, by the `tokenizers` library: GPT-2's, Llama 3's, any tokenizer.json.

    tokenizer.json              the whole tokenizer, or
    vocab.json  merges.txt      GPT-2's byte-level BPE in its older form
    tokenizer_config.json  special_tokens_map.json  generation_config.json  config.json
                                which token ends a text; the first that names one decides

The ids are those of transformers without a BOS and with split_special_tokens: the names of special tokens in a text
are ordinary characters, so that no text can forge the end of a document.

The library encodes in the calling thread, without Python's lock. Its own pool of threads is off unless
TOKENIZERS_PARALLELISM turns it on: it would have a thread for every core next to those that compute, and it does not
survive a fork.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.data.tokenizer import MAX_PIECE_CHARS
from parallel3d.errors import DataError, shorten

KIND = "huggingface"
TOKENIZER_JSON, VOCAB, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
SETTINGS, GENERATION, MODEL_CONFIG = "tokenizer_config.json", "generation_config.json", "config.json"
EOS_TOKEN = "<|endoftext|>"
"""Ends documents in the tokenizers that are trained here."""
KNOWN_EOS_TOKENS = (EOS_TOKEN, "<|end_of_text|>", "</s>", "<eos>")
"""Where no file names one: of GPT-2, Llama 3, Llama 2 and Gemma."""
KEPT_FILES = (SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files that go along unchanged, for programs that open the folder."""
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
MIN_VOCAB_SIZE = 256 + 1  # every byte, and EOS
PARALLELISM = "TOKENIZERS_PARALLELISM"

_SAFE_CUT = re.compile(r"(?<=\S)\n(?=[^\W\d_])")
"""One line end before a letter: GPT-2's and Llama 3's patterns end a word there in any text."""
_CUT_WITHIN = 50_000
"""Characters before the end of a piece that are searched for a safe cut."""

Log = Callable[[str], None]


class HuggingFaceTokenizer:
    """A tokenizer.json, and the id that ends documents."""

    kind = KIND

    def __init__(self, files: Mapping[str, bytes], *, eos_id: int, name: str = "the tokenizer"):
        """`files` has tokenizer.json, and others that are kept with it. Raises DataError, with `name`."""
        from tokenizers import AddedToken

        self.files, self.eos_id = files, eos_id
        self._name, self._tokenizer = name, _parse(files[TOKENIZER_JSON], name)
        if (token := self._tokenizer.id_to_token(eos_id)) is None:
            raise DataError(
                f"{name} has no token {eos_id}, which data.tokenizer.eos_id or {GENERATION} names as the end of a text"
            )
        self._tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        self._tokenizer.encode_special_tokens = True  # as characters
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())  # ids may have gaps

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Names and ids of special tokens, which `encode` does not take for such."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @property
    def prefix_ids(self) -> list[int]:
        """The tokens that transformers puts in front of a text, such as BOS; training here has none."""
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        return whole[: max(0, len(whole) - len(plain))] if plain and whole[-len(plain) :] == plain else []

    def encode(self, text: str) -> np.ndarray:
        batches = (  # of one text, since `encode` holds Python's lock and encode_batch does not
            self._tokenizer.encode_batch([piece], add_special_tokens=False) for piece in pieces_of(text)
        )
        ids = np.concatenate([np.array(batch[0].ids, np.int32) for batch in batches] or [np.zeros(0, np.int32)])
        if (ids == self.eos_id).any():
            raise DataError(
                f"{self._name} has {self.eos_id} in ordinary text ({shorten(repr(text), 60)}), which should only end "
                "documents: set data.tokenizer.eos_id to another token"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)


def pieces_of(text: str) -> Iterator[str]:
    """Cuts a text into pieces of at most MAX_PIECE_CHARS, between lines where that changes no id."""
    start = 0
    while len(text) - start > MAX_PIECE_CHARS:
        end = start + MAX_PIECE_CHARS
        cuts = [found.end() for found in _SAFE_CUT.finditer(text, max(start, end - _CUT_WITHIN), end + 1)]
        end = cuts[-1] if cuts else end
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def train_byte_level(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens with GPT-2's words; EOS is 0. The same text gives the same
    one."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(f"data.tokenizer.vocab_size = {vocab_size}: must be at least {MIN_VOCAB_SIZE} (bytes and EOS)")
    use_one_thread()
    from tokenizers import trainers

    tokenizer = _byte_level({}, [], add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=tokenizer.pre_tokenizer.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    files = {TOKENIZER_JSON: tokenizer.to_str(pretty=True).encode()}
    return HuggingFaceTokenizer(files | _missing_files(EOS_TOKEN, 0, {}), eos_id=0)


def is_hf_tokenizer(path: Path) -> bool:
    """Whether a folder or a file holds a tokenizer in one of these forms."""
    if path.is_dir():
        return (path / TOKENIZER_JSON).is_file() or all((path / name).is_file() for name in (VOCAB, MERGES))
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"{")


def hf_files_of(path: Path) -> list[Path]:
    """All files next to or in `path` that decide about the tokenizer."""
    folder = path if path.is_dir() else path.parent
    names = (TOKENIZER_JSON, VOCAB, MERGES, *KEPT_FILES, GENERATION, MODEL_CONFIG)
    found = [folder / name for name in names if (folder / name).is_file()]
    return found if path.is_dir() or path in found else [path, *found]


def open_hf_tokenizer(path: Path, *, eos_id: int | None = None, log: Log = lambda text: None) -> HuggingFaceTokenizer:
    """Opens a folder, or the tokenizer.json of one. `eos_id` replaces what the folder says; DataError if neither names
    the token that ends a text."""
    folder = path if path.is_dir() else path.parent
    settings = {name: read_object(folder / name) for name in (*KEPT_FILES[:2], GENERATION, MODEL_CONFIG)}
    whole = path if path.is_file() else folder / TOKENIZER_JSON
    if whole.name in (VOCAB, MERGES):
        raise DataError(f"{path}: a part of a tokenizer: set data.tokenizer.path to the folder")
    if whole.is_file():
        content = _read(whole)
        tokenizer = _parse(content, str(whole))
    else:
        tokenizer = _from_vocab_and_merges(folder, settings[SETTINGS])
        content = tokenizer.to_str(pretty=True).encode()
    if eos_id is None:
        eos_id = find_eos(tokenizer, settings, path, log)
    kept = {name: _read(folder / name) for name in KEPT_FILES if (folder / name).is_file()}
    missing = _missing_files(tokenizer.id_to_token(eos_id), eos_id, settings)
    return HuggingFaceTokenizer({**missing, **kept, TOKENIZER_JSON: content}, eos_id=eos_id, name=str(path))


def find_eos(tokenizer: Any, settings: Mapping[str, Mapping[str, Any]], path: Path, log: Log) -> int:
    """The id that ends a text by the folder's files; logs the others if several are named."""
    named: list[tuple[str, int]] = []
    for file in (SETTINGS, "special_tokens_map.json"):
        token = settings[file].get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and (found := tokenizer.token_to_id(str(token))) is None:
            raise DataError(
                f"{path}: {file} ends texts with {token!r}, which {TOKENIZER_JSON} lacks: set data.tokenizer.eos_id"
            )
        named += [(file, found)] if token is not None else []
    for file in (GENERATION, MODEL_CONFIG):
        ids = settings[file].get("eos_token_id")
        named += [(file, each) for each in (ids if isinstance(ids, list) else [ids]) if isinstance(each, int)]
    if named:
        file, chosen = named[0]
        if others := sorted({each for _, each in named} - {chosen}):
            log(
                f"{path}: documents end with {_quote(tokenizer, chosen)}, from {file}; other files of the folder also "
                f"name {', '.join(_quote(tokenizer, each) for each in others)}: data.tokenizer.eos_id chooses another"
            )
        return chosen
    known = [each for each in map(tokenizer.token_to_id, KNOWN_EOS_TOKENS) if each is not None]
    if len(known) == 1:
        return known[0]
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    listed = ", ".join(_quote(tokenizer, number) for number in special[:10]) or "none"
    raise DataError(
        f"{path} doesn't say which token ends a text: set data.tokenizer.eos_id, or add {SETTINGS} with "
        f'"eos_token" next to it. Its special tokens: {listed}'
    )


def _quote(tokenizer: Any, number: int) -> str:
    return f"{number} ({tokenizer.id_to_token(number)})"


def _missing_files(token: str | None, eos_id: int, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """The files by which other programs find EOS, as far as the folder lacks them or names others."""
    config, generation = settings.get(MODEL_CONFIG, {}), dict(settings.get(GENERATION, {}))
    ends = generation.get("eos_token_id")
    if eos_id not in (ends if isinstance(ends, list) else [ends]):
        generation["eos_token_id"] = eos_id
    if config.get("bos_token_id") is not None:
        generation.setdefault("bos_token_id", config["bos_token_id"])
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": token,
        "clean_up_tokenization_spaces": False,
    }
    return {
        name: (json.dumps(value, indent=2) + "\n").encode()
        for name, value in ((SETTINGS, own), (GENERATION, generation))
    }


def _parse(content: bytes, name: str) -> Any:
    """The library's tokenizer."""
    use_one_thread()
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing narrower
        version = metadata.version("tokenizers")
        raise DataError(f"{name}: not a tokenizer that tokenizers {version} reads ({shorten(str(error))})") from error


def _from_vocab_and_merges(folder: Path, settings: Mapping[str, Any]) -> Any:
    """GPT-2's byte-level BPE of a folder's vocab.json and merges.txt."""
    if (kind := settings.get("tokenizer_class", GPT2_CLASSES[0])) not in GPT2_CLASSES:
        raise DataError(
            f"{folder}: {VOCAB} and {MERGES} without {TOKENIZER_JSON} are read as GPT-2's, and {SETTINGS} says {kind}: "
            "open the folder with transformers' AutoTokenizer, and save_pretrained writes a tokenizer.json"
        )
    use_one_thread()
    from tokenizers import models

    vocab = read_object(folder / VOCAB)
    try:
        _, merges = models.BPE.read_file(str(folder / VOCAB), str(folder / MERGES))
        tokenizer = _byte_level(vocab, merges, add_prefix_space=bool(settings.get("add_prefix_space", False)))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{folder}: {VOCAB} and {MERGES} don't fit together ({shorten(str(error))})") from error
    if EOS_TOKEN in vocab:
        tokenizer.add_special_tokens([EOS_TOKEN])
    return tokenizer


def _byte_level(vocab: Mapping[str, Any], merges: list[tuple[str, str]], *, add_prefix_space: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(dict(vocab), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def use_one_thread() -> None:
    """Turns the library's own threads off, unless the user has set them. Only the environment can, before first use."""
    os.environ.setdefault(PARALLELISM, "false")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty for a missing one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: must be a JSON object")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror})") from error
