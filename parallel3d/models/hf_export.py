"""Converts a checkpoint to a Hugging Face folder, tokenizer included, with one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.disk import Disk, new_folder, refuse_existing
from parallel3d.checkpoint.index import Format
from parallel3d.checkpoint.read import CheckpointReader
from parallel3d.checkpoint.shard import StoredTensor, split_into_files
from parallel3d.config.schema import ModelConfig
from parallel3d.data.hf_tokenizer import hf_byte_tokenizer_files, hf_tokenizer_files
from parallel3d.data.tokenizer import MODEL_FILE, ByteTokenizer
from parallel3d.data.tokenizer_files import open_tokenizer
from parallel3d.errors import DataError, UserError
from parallel3d.models.hf import hf_tensors
from parallel3d.models.hf_config import CONFIG, hf_config, read_json
from parallel3d.models.hf_folder import GENERATION, SPECIAL_IDS, TOKENIZER_FILES
from parallel3d.models.initial_weights import model_config_of
from parallel3d.models.make import shardings_of
from parallel3d.models.weight_files import ExportedWeights, index_files, write_side_files, write_weight_files
from parallel3d.precision.dtypes import STORED_DTYPES


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The files of a tokenizer in a Hugging Face folder."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json: which ids begin a text, end it and fill it up."""
    warning: str = ""
    """A line for the user."""


def export(
    source: Path, target: Path, *, weight_format: Format | None, tokenizer: Path | None, max_file_bytes: int
) -> Iterator[str]:
    """Writes the checkpoint `source` to the new folder `target`; yields lines that describe it.

    `wanted` is the weights' format there (None: as they are), `tokenizer` one that replaces the checkpoint's own: a
    SentencePiece model or a Hugging Face folder. Raises UserError and OSError; the folder is complete or doesn't exist.
    """
    refuse_existing(target)
    index = verify_checkpoint(source)
    model = model_config_of(index, source)
    reader, table = CheckpointReader(source, index), hf_tensors(model)
    weights = ExportedWeights.of(reader, shardings_of(model), table)
    stored, tokenizer_output = weights.stored(weight_format), tokenizer_files(reader, model, tokenizer)
    yield f"step {index.step} of {source}, every byte verified: {len(stored)} tensors"
    parts, disk = split_into_files(stored, max_file_bytes), Disk()
    with new_folder(disk, target) as folder:
        yield from write_weight_files(disk, folder, parts, weights.read)
        write_side_files(disk, folder, json_files(model, parts, tokenizer_output), tokenizer_output.files)
    if tokenizer_output.warning:
        yield f"note: {tokenizer_output.warning}"
    yield f"written to {target}: AutoModelForCausalLM.from_pretrained({str(target)!r})"


def json_files(
    model: ModelConfig, parts: Sequence[Sequence[StoredTensor]], tokenizer: TokenizerFiles
) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder by name."""
    dtype = str(STORED_DTYPES[parts[0][0].format]).removeprefix("torch.")
    files = {
        CONFIG: hf_config(model)
        | {name: tokenizer.generation.get(name) for name in SPECIAL_IDS}
        | {"torch_dtype": dtype},
        GENERATION: dict(tokenizer.generation),
    }
    return files | index_files(parts)


def tokenizer_files(reader: CheckpointReader, model: ModelConfig, path: Path | None) -> TokenizerFiles:
    """The tokenizer that the weights were trained with: the checkpoint's, or that in `path`."""
    checkpoint_files = {file.name: reader.folder / file.name for file in reader.index.files}
    longest = model.max_position_embeddings or 0
    if path is None and GENERATION in checkpoint_files:  # unchanged from a Hugging Face folder
        files = {name: checkpoint_files[name].read_bytes() for name in TOKENIZER_FILES if name in checkpoint_files}
        return TokenizerFiles(files=files, generation=read_json(checkpoint_files[GENERATION]))
    if path is not None or MODEL_FILE in checkpoint_files:
        path = path or checkpoint_files[MODEL_FILE]
        tokenizer = open_tokenizer(path)
        if tokenizer.vocab_size > model.vocab_size:
            raise UserError(f"{path} has {tokenizer.vocab_size} pieces, the model a vocabulary of {model.vocab_size}")
        own, generation = dict(tokenizer.files), eos_settings(tokenizer.eos_id)
        if GENERATION in own:  # Hugging Face's
            return TokenizerFiles(generation=json.loads(own.pop(GENERATION)), files=own)
        try:
            files = own | hf_tokenizer_files(own[MODEL_FILE], max_length=longest)
            return TokenizerFiles(files=files, generation=generation)
        except DataError as error:
            return TokenizerFiles(files=own, generation=generation, warning=f"tokenizer.json is not written: {error}")
    if reader.index.facts.config.get("data", {}).get("tokenizer", {}).get("kind") == "bytes":
        files = hf_byte_tokenizer_files(max_length=longest)
        return TokenizerFiles(files=files, generation=eos_settings(ByteTokenizer.eos_id))
    return TokenizerFiles(warning="the checkpoint has no tokenizer: give one with --tokenizer PATH")


def eos_settings(eos_id: int) -> dict[str, Any]:
    """The ids that start a text, end it, and pad the shorter texts of a batch."""
    return {"eos_token_id": eos_id, "pad_token_id": eos_id}
