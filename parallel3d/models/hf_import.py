"""Converts a Hugging Face folder to a weights-only checkpoint, tokenizer included, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.disk import refuse_existing
from parallel3d.checkpoint.index import Format, RunFacts
from parallel3d.checkpoint.tensor_chunks import stored_rows, tensors_of
from parallel3d.checkpoint.weights import write_weights
from parallel3d.checkpoint.write import buffers_of
from parallel3d.models.hf import check_zeros
from parallel3d.models.hf_config import read_json
from parallel3d.models.hf_folder import GENERATION, SPECIAL_IDS, TOKENIZER_FILES, HfFolder, HfLazyTensor, open_hf_folder
from parallel3d.models.make import shardings_of
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.precision.dtypes import FORMAT_OF, STORED_DTYPES


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """A tensor as a checkpoint stores it: rows of a Hugging Face tensor, or columns where that is transposed."""

    stored: HfLazyTensor
    part: tuple[slice, ...]
    transposed: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def read(self) -> Tensor:
        value = self.stored[self.part]
        return value.t() if self.transposed else value


def import_folder(path: Path, target: Path, *, weight_format: Format | None) -> Iterator[str]:
    """Writes the checkpoint `target` from the folder `path`; yields lines that describe it.

    `wanted` is the weights' format there (None: as they are). Raises UserError and OSError; the checkpoint is complete
    or does not exist.
    """
    refuse_existing(target)
    source = open_hf_folder(path)
    files = side_files(source)
    check_zeros(source.table, source.read)
    shardings = shardings_of(source.model)
    shapes = {name: shape for sharding in shardings for name, shape in tensors_of(sharding).items()}
    values = {name: value for sharding in shardings for name, value in checkpoint_tensors(sharding, source)}
    formats = {name: weight_format or FORMAT_OF[values[name].dtype].stored_name for name in shapes}
    index = write_weights(
        target,
        {name: (formats[name], shape) for name, shape in shapes.items()},
        (buffer for name in shapes for buffer in buffers_of(values[name].read().to(STORED_DTYPES[formats[name]]))),
        facts=RunFacts(
            state={},
            config={"model": source.model.model_dump()},
            versions={name: metadata.version(name) for name in ("parallel3d", "torch", "safetensors")},
        ),
        step=0,
        files=files,
    )
    yield f"{len(source.stored)} tensors, {index.num_bytes / 1e6:,.1f} MB, written to {target}"


def checkpoint_tensors(sharding: ParamSharding, source: HfFolder) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yields the tensors as which a parameter is stored. Each lies within one Hugging Face tensor."""
    theirs = [tensor for tensor in source.table if tensor.name == sharding.name]
    for name, rows, first in stored_rows(sharding, range(sharding.shape[0])):
        tensor = next(tensor for tensor in theirs if first in tensor.rows and first + len(rows) - 1 in tensor.rows)
        span = slice(first - tensor.first_row, first - tensor.first_row + len(rows))
        part = (slice(None), span) if tensor.transposed else (span,)
        yield name, CheckpointTensor(stored=source.read(tensor.hf_name), part=part, transposed=tensor.transposed)


def side_files(source: HfFolder) -> dict[str, bytes]:
    """The tokenizer's files, unchanged, and the file of special ids. Raises CheckpointError for damaged JSON."""
    paths = (source.path / name for name in (*TOKENIZER_FILES, GENERATION))
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    if GENERATION in files:
        read_json(source.path / GENERATION)  # hf_export reads it
    ids = {name: source.config[name] for name in SPECIAL_IDS if name in source.config}
    return {GENERATION: json.dumps(ids).encode()} | files
