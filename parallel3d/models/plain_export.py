"""Converts a checkpoint of any model to a plain folder: safetensors files under the names of the model's own modules,
as the state_dict of the whole model has them, and config.json with the run's configuration.

    layers.0.attention.qkv.weight     module attention.qkv of the block that ModelParts.block(0) makes
    embedding.weight, head.norm.weight     of the user's own embedding and head, or of ours

A checkpoint holds no buffers: those of a user's own layers get the values that their constructor gives them, as in a
run that resumes. One tensor is in memory at a time, and one block for its buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.disk import Disk, new_folder, refuse_existing
from parallel3d.checkpoint.index import Format
from parallel3d.checkpoint.read import CheckpointReader
from parallel3d.checkpoint.shard import StoredTensor, split_into_files
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import UserError
from parallel3d.models.hf import HfTensor
from parallel3d.models.hf_config import CONFIG
from parallel3d.models.initial_weights import model_config_of
from parallel3d.models.make import saved_buffers, shardings_of
from parallel3d.models.weight_files import ExportedWeights, index_files, write_side_files, write_weight_files
from parallel3d.precision.dtypes import STORED_DTYPES

BUFFER_FORMATS: dict[torch.dtype, Format] = {
    **{dtype: name for name, dtype in STORED_DTYPES.items()},
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.complex64: "C64",
}
"""What safetensors files can hold."""


class BuiltBuffers:
    """The buffers that the state_dict of a user's own layers holds, as their constructor makes them."""

    def __init__(self, model: ModelConfig, *, seed: int):
        self.model, self.seed = model, seed
        self._layer_of: dict[str, int] = {}
        self.stored: list[StoredTensor] = []
        for layer in range(model.num_hidden_layers if model.module is not None else 0):
            for name, buffer in saved_buffers(model, layer, seed=seed, device="meta").items():
                self._layer_of[name] = layer
                self.stored.append(StoredTensor(key=name, format=_format_of(name, buffer), shape=tuple(buffer.shape)))
        self._values_of = lru_cache(maxsize=1)(self._build)

    def __contains__(self, name: str) -> bool:
        return name in self._layer_of

    def read(self, name: str) -> Tensor:
        return self._values_of(self._layer_of[name])[name]

    def _build(self, layer: int) -> dict[str, Tensor]:
        return saved_buffers(self.model, layer, seed=self.seed, device="cpu")


def export_plain(source: Path, target: Path, *, weight_format: Format | None, max_file_bytes: int) -> Iterator[str]:
    """Writes the checkpoint `source` to the new folder `target`; yields lines that describe it.

    `weight_format` is that of the weights there (None: as they are). Raises UserError and OSError; the folder is
    complete or doesn't exist.
    """
    refuse_existing(target)
    index = verify_checkpoint(source)
    model, reader = model_config_of(index, source), CheckpointReader(source, index)
    shardings = shardings_of(model)
    table = [HfTensor(hf_name=each.name, shape=each.shape, name=each.name) for each in shardings]
    weights, buffers = ExportedWeights.of(reader, shardings, table), BuiltBuffers(model, seed=index.facts.seed)
    stored = [*weights.stored(weight_format), *buffers.stored]
    yield f"step {index.step} of {source}, every byte verified: {len(stored)} tensors"

    def read(tensor: StoredTensor) -> Tensor:
        return buffers.read(tensor.key) if tensor.key in buffers else weights.read(tensor)

    files, disk = split_into_files(stored, max_file_bytes), Disk()
    contents = {CONFIG: {"step": index.step, "config": index.facts.config}} | index_files(files)
    with new_folder(disk, target) as folder:
        yield from write_weight_files(disk, folder, files, read)
        write_side_files(disk, folder, contents, reader.side_files())
    yield f"written to {target}: the names are those of the model's state_dict()"


def _format_of(name: str, buffer: Tensor) -> Format:
    if (found := BUFFER_FORMATS.get(buffer.dtype)) is None:
        raise UserError(
            f"model.module: the buffer {name} is {buffer.dtype}, which safetensors files can't hold: make it one that"
            " is not saved (register_buffer(..., persistent=False))"
        )
    return found
