"""Reads a Hugging Face folder: config.json, and safetensors files with or without an index.

    config.json                                           the model: read by hf_config.py
    model.safetensors                                     all tensors, or
    model-00001-of-00002.safetensors, ...                 some of them each, and
    model.safetensors.index.json                          which is where: {"weight_map": {tensor: file}}

Opening it checks that every tensor of the model exists, with its shape and a floating-point format, before any is read.
Pickled weights (pytorch_model.bin) are refused: loading them could run code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel3d.config.schema import ModelConfig
from parallel3d.errors import CheckpointError
from parallel3d.families.spec import JsonFields
from parallel3d.models.hf import HfTensor, hf_tensors
from parallel3d.models.hf_config import hf_model_of, read_hf_config, read_json
from parallel3d.precision.dtypes import STORED_DTYPES

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "tokenizer.model",
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id")
"""Fields of config.json that the tokenizer decides."""
MAX_NAMED = 5

_TABLES = re.compile(r"(\.attn\.(bias|masked_bias)|\.rotary_emb\.inv_freq)$")
"""Tensors that hold no weights: masks and rotary frequencies, which older versions saved."""


@dataclass(frozen=True, kw_only=True)
class HfLazyTensor:
    """A tensor in a file. Each read opens the file again, so that only the pages in use are mapped."""

    path: Path
    key: str
    shape: tuple[int, ...]
    format: str
    """Its name in safetensors files."""

    @property
    def dtype(self) -> torch.dtype:
        return STORED_DTYPES[self.format]

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        try:
            with safe_open(self.path, framework="pt") as file:
                return file.get_slice(self.key)[part]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path} is damaged: {error}") from None


@dataclass(frozen=True, kw_only=True)
class HfFolder:
    """A Hugging Face model whose tensors all exist."""

    path: Path
    model: ModelConfig
    """Ours, resolved."""
    config: JsonFields
    """Its config.json."""
    table: tuple[HfTensor, ...]
    stored: Mapping[str, HfLazyTensor]
    """By the names of `table`."""

    def read(self, hf_name: str) -> HfLazyTensor:
        """Returns a tensor by its name in the table."""
        return self.stored[hf_name]


def open_hf_folder(path: Path) -> HfFolder:
    """Opens the model in a folder; raises CheckpointError that names what is wrong with it."""
    model, config = read_hf_config(path)
    table = hf_tensors(model)
    there = find_tensors(path)
    base = hf_model_of(model).base
    names = {tensor.hf_name: _name_in(there, tensor.hf_name, base) for tensor in table}
    _refuse(path, "lacks", [name for name, found in names.items() if found is None])
    stored = {name: there[found] for name, found in names.items() if found is not None}
    _refuse(path, "has tensors that the model lacks:", _superfluous(there, names.values(), model))
    _refuse(path, "does not fit its config.json:", _misfits(table, stored))
    return HfFolder(path=path, model=model, config=config, table=table, stored=stored)


def find_tensors(path: Path) -> dict[str, HfLazyTensor]:
    """All tensors in a folder's files by name, from the headers alone."""
    if (path / WEIGHTS_INDEX).is_file():
        where = str(path / WEIGHTS_INDEX)
        files = read_json(path / WEIGHTS_INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise CheckpointError(f"{where} has no weight_map from tensors to files")
        if strange := [name for name in files.values() if PurePath(name).name != name]:
            raise CheckpointError(f"{where} names {strange[0]!r}, which is not the name of a file in the folder")
        there = {name: _headers(path / name) for name in sorted(set(files.values()))}
        _refuse(
            Path(where), "names tensors that its files lack:", [k for k, name in files.items() if k not in there[name]]
        )
        return {key: there[name][key] for key, name in files.items()}
    if (path / WEIGHTS).is_file():
        return _headers(path / WEIGHTS)
    found = sorted(p.name for p in path.glob("*") if p.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    if any(name.endswith(".safetensors") for name in found):
        raise CheckpointError(f"{path} holds {found[0]} but no {WEIGHTS_INDEX}, which names the file of each tensor")
    if found:
        raise CheckpointError(
            f"{path} holds only pickled weights ({found[0]}), which could run code: save the model again with"
            " transformers' save_pretrained, which writes safetensors"
        )
    raise CheckpointError(f"{path} holds neither {WEIGHTS} nor {WEIGHTS_INDEX}")


def _headers(path: Path) -> dict[str, HfLazyTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
            return {
                key: HfLazyTensor(path=path, key=key, shape=tuple(part.get_shape()), format=part.get_dtype())
                for key, part in slices.items()
            }
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _name_in(there: Mapping[str, HfLazyTensor], name: str, base: str) -> str | None:
    """A tensor's name in the files: with or without the base model's prefix."""
    return next((known for known in (name, name.removeprefix(base)) if known in there), None)


def _superfluous(there: Iterable[str], used: Iterable[str | None], model: ModelConfig) -> list[str]:
    known = {*used, *(["lm_head.weight"] if model.tie_word_embeddings else [])}
    return [name for name in there if name not in known and not _TABLES.search(name)]


def _misfits(table: Sequence[HfTensor], stored: Mapping[str, HfLazyTensor]) -> Iterator[str]:
    for tensor in table:
        found = stored[tensor.hf_name]
        if found.shape != tensor.shape:
            yield f"{found.key} has the shape {found.shape}, not {tensor.shape}"
        elif found.format not in STORED_DTYPES:
            yield f"{found.key} is of format {found.format}, not one of {', '.join(STORED_DTYPES)}"


def _refuse(path: Path, what: str, names: Iterable[str]) -> None:
    if listed := list(names):
        more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
        raise CheckpointError(f"{path} {what} {', '.join(listed[:MAX_NAMED])}{more}")
