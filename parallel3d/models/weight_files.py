"""Writes the weights of a model folder: safetensors files of a largest size, one tensor in memory at a time, and the
index of several files, all under the names that Hugging Face's tools expect.

Such a tensor is some rows of one of our parameters, and so is a stored tensor: the former is assembled from the
overlapping rows of the latter, and transposed if the table says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.disk import Disk
from parallel3d.checkpoint.index import WEIGHT, Format
from parallel3d.checkpoint.read import CheckpointReader, check_shapes
from parallel3d.checkpoint.shard import StoredTensor, write_shard
from parallel3d.checkpoint.tensor_chunks import stored_rows
from parallel3d.checkpoint.write import buffers_of
from parallel3d.models.hf import HfTensor
from parallel3d.models.hf_folder import WEIGHTS, WEIGHTS_INDEX
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.precision.dtypes import STORED_DTYPES


@dataclass(frozen=True, kw_only=True)
class ExportedWeights:
    """The weights of a model folder, which a checkpoint holds under names of ours."""

    table: Mapping[str, HfTensor]
    """By the names in the folder."""
    shardings: Mapping[str, ParamSharding]
    """By the names of our parameters."""
    reader: CheckpointReader

    @classmethod
    def of(
        cls, reader: CheckpointReader, shardings: Iterable[ParamSharding], table: Iterable[HfTensor]
    ) -> ExportedWeights:
        """Raises CheckpointError if the checkpoint lacks a parameter or has it in another shape."""
        by_name = {sharding.name: sharding for sharding in shardings}
        check_shapes(reader, by_name.values())
        return cls(table={tensor.hf_name: tensor for tensor in table}, shardings=by_name, reader=reader)

    def stored(self, weight_format: Format | None) -> list[StoredTensor]:
        """The tensors of the folder as they are stored there, in `weight_format` (None: in the checkpoint's)."""
        return [
            StoredTensor(key=name, format=weight_format or self._saved_format(tensor), shape=tensor.shape)
            for name, tensor in self.table.items()
        ]

    def read(self, stored: StoredTensor) -> Tensor:
        """A whole tensor of the folder, in the format in which it is stored there."""
        return self._read_whole(self.table[stored.key]).to(STORED_DTYPES[stored.format])

    def _saved_format(self, tensor: HfTensor) -> Format:
        """The format of a tensor's weights in the checkpoint; of zeros that stand for a bias that of their module's."""
        if tensor.name is None:
            tensor = self.table[f"{tensor.hf_name.removesuffix('bias')}weight"]
        assert tensor.name is not None
        name = next(stored_rows(self.shardings[tensor.name], tensor.rows))[0]
        return self.reader.index.tensors[name].kinds[WEIGHT]

    def _read_whole(self, tensor: HfTensor) -> Tensor:
        """A whole tensor of the folder, in the checkpoint's format."""
        self.reader.close()  # releases what was read for the previous tensor
        if tensor.name is None:
            return torch.zeros(tensor.shape)
        whole: Tensor | None = None
        for name, rows, first in stored_rows(self.shardings[tensor.name], tensor.rows):
            shape = self.reader.index.tensors[name].shape
            part = self.reader.read(WEIGHT, name, (rows.start, *[0] * (len(shape) - 1)), (len(rows), *shape[1:]))
            if tuple(part.shape) == tensor.shape and not tensor.transposed:
                return part
            whole = part.new_empty(tensor.shape) if whole is None else whole
            (whole.t() if tensor.transposed else whole)[first : first + len(rows)] = part
        assert whole is not None, f"no part of {tensor.hf_name} is stored"
        return whole


def write_weight_files(
    disk: Disk, folder: Path, files: Sequence[Sequence[StoredTensor]], read: Callable[[StoredTensor], Tensor]
) -> Iterator[str]:
    """Writes `files` of tensors, whose values `read` gives in their format; yields a line for each. Raises OSError."""
    for name, tensors in zip(file_names(len(files)), files):
        buffers = (buffer for tensor in tensors for buffer in buffers_of(read(tensor)))
        file = write_shard(disk, folder / name, tensors, buffers)
        yield f"{name}: {len(tensors)} tensors, {file.size / 1e6:,.1f} MB"


def write_side_files(
    disk: Disk, folder: Path, contents: Mapping[str, Mapping[str, Any]], files: Mapping[str, bytes]
) -> None:
    """Writes what accompanies the weights by name: `contents` as JSON, `files` as they are. Raises OSError."""
    encoded = {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()}
    for name, data in {**encoded, **files}.items():
        disk.write_file(folder / name, data)


def index_files(files: Sequence[Sequence[StoredTensor]]) -> dict[str, dict[str, Any]]:
    """The JSON file, by name, that says which tensor is in which file; none for a single file."""
    if len(files) == 1:
        return {}
    size = sum(tensor.num_bytes for part in files for tensor in part)
    names = zip(file_names(len(files)), files)
    weight_map = {tensor.key: name for name, part in names for tensor in part}
    return {WEIGHTS_INDEX: {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}}


def file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS]
    stem, suffix = WEIGHTS.split(".")
    return [f"{stem}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1)]
