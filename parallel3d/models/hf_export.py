"""Converts a checkpoint to a Hugging Face folder, tokenizer included, with one tensor in memory at a time.

A Hugging Face tensor is some rows of one of our parameters, and so is a stored tensor: the former is assembled from the
overlapping rows of the latter, and transposed if Hugging Face stores it so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.disk import Disk, new_folder, refuse_existing
from parallel3d.checkpoint.index import WEIGHT, Format
from parallel3d.checkpoint.read import CheckpointReader, check_shapes
from parallel3d.checkpoint.shard import StoredTensor, split_into_files, write_shard
from parallel3d.checkpoint.tensor_chunks import stored_rows
from parallel3d.checkpoint.write import buffers_of
from parallel3d.config.schema import ModelConfig
from parallel3d.data.hf_tokenizer import hf_byte_tokenizer_files, hf_tokenizer_files
from parallel3d.data.tokenizer import MODEL_FILE, ByteTokenizer
from parallel3d.data.tokenizer_files import open_tokenizer
from parallel3d.errors import DataError, UserError
from parallel3d.models.hf import HfTensor, hf_tensors
from parallel3d.models.hf_config import CONFIG, hf_config, read_json
from parallel3d.models.hf_folder import GENERATION, SPECIAL_IDS, TOKENIZER_FILES, WEIGHTS, WEIGHTS_INDEX
from parallel3d.models.initial_weights import model_config_of
from parallel3d.models.make import shardings_of
from parallel3d.parallel.sharding import ParamSharding
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
    reader, shardings = CheckpointReader(source, index), {s.name: s for s in shardings_of(model)}
    check_shapes(reader, shardings.values())
    table = {tensor.hf_name: tensor for tensor in hf_tensors(model)}
    formats = {name: weight_format or saved_format(tensor, shardings, reader) for name, tensor in table.items()}
    stored = [StoredTensor(key=name, format=formats[name], shape=table[name].shape) for name in table]
    tokenizer_output = tokenizer_files(reader, model, tokenizer)
    yield f"step {index.step} of {source}, every byte verified: {len(stored)} tensors"
    parts, disk = split_into_files(stored, max_file_bytes), Disk()
    with new_folder(disk, target) as folder:
        for name, tensors in zip(file_names(len(parts)), parts):
            values = (read_hf_tensor(table[tensor.key], shardings, reader) for tensor in tensors)
            converted = (value.to(STORED_DTYPES[tensor.format]) for tensor, value in zip(tensors, values))
            buffers = (buffer for value in converted for buffer in buffers_of(value))
            file = write_shard(disk, folder / name, tensors, buffers)
            yield f"{name}: {len(tensors)} tensors, {file.size / 1e6:,.1f} MB"
        for name, content in json_files(model, parts, tokenizer_output).items():
            disk.write_file(folder / name, (json.dumps(content, indent=2) + "\n").encode())
        for name, data in tokenizer_output.files.items():
            disk.write_file(folder / name, data)
    if tokenizer_output.warning:
        yield f"note: {tokenizer_output.warning}"
    yield f"written to {target}: AutoModelForCausalLM.from_pretrained({str(target)!r})"


def read_hf_tensor(tensor: HfTensor, shardings: Mapping[str, ParamSharding], reader: CheckpointReader) -> Tensor:
    """A whole Hugging Face tensor, in the checkpoint's format."""
    reader.close()  # releases what was read for the previous tensor
    if tensor.name is None:
        return torch.zeros(tensor.shape)
    whole: Tensor | None = None
    for name, rows, first in stored_rows(shardings[tensor.name], tensor.rows):
        shape = reader.index.tensors[name].shape
        part = reader.read(WEIGHT, name, (rows.start, *[0] * (len(shape) - 1)), (len(rows), *shape[1:]))
        if tuple(part.shape) == tensor.shape and not tensor.transposed:
            return part
        whole = part.new_empty(tensor.shape) if whole is None else whole
        (whole.t() if tensor.transposed else whole)[first : first + len(rows)] = part
    assert whole is not None, f"no part of {tensor.hf_name} is stored"
    return whole


def saved_format(tensor: HfTensor, shardings: Mapping[str, ParamSharding], reader: CheckpointReader) -> Format:
    """The format of a tensor's weights in the checkpoint."""
    if tensor.name is None:
        return "F32"
    name = next(stored_rows(shardings[tensor.name], tensor.rows))[0]
    return reader.index.tensors[name].kinds[WEIGHT]


def file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS]
    stem, suffix = WEIGHTS.split(".")
    return [f"{stem}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1)]


def json_files(
    model: ModelConfig, parts: Sequence[Sequence[StoredTensor]], tokenizer: TokenizerFiles
) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder by name."""
    dtype = str(STORED_DTYPES[parts[0][0].format]).removeprefix("torch.")
    files: dict[str, dict[str, Any]] = {
        CONFIG: hf_config(model)
        | {name: tokenizer.generation.get(name) for name in SPECIAL_IDS}
        | {"torch_dtype": dtype},
        GENERATION: dict(tokenizer.generation),
    }
    if len(parts) > 1:
        size = sum(tensor.num_bytes for part in parts for tensor in part)
        names = zip(file_names(len(parts)), parts)
        weight_map = {tensor.key: name for name, part in names for tensor in part}
        files[WEIGHTS_INDEX] = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    return files


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
