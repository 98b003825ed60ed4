"""Converts a checkpoint to plain safetensors files: of any model, layers of a user's own included.

A tensor is a whole parameter under the name that it has in the model: `layers.3.` and then what the user's block calls
it in its state_dict. So the names of a checkpoint's tensors stay, but for the blocks of a fused weight, which are one
tensor here. One tensor is in memory at a time, or two of a fused one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.disk import Disk, new_folder, refuse_existing
from parallel3d.checkpoint.index import WEIGHT, Format
from parallel3d.checkpoint.read import CheckpointReader, check_shapes
from parallel3d.checkpoint.shard import StoredTensor, split_into_files
from parallel3d.checkpoint.tensor_chunks import tensors_of
from parallel3d.models.hf_export import index_file, tokenizer_files, write_weight_files
from parallel3d.models.initial_weights import model_config_of
from parallel3d.models.make import shardings_of
from parallel3d.parallel.sharding import ParamSharding

RUN_CONFIG = "run_config.json"


def export_plain(
    source: Path, target: Path, *, weight_format: Format | None, tokenizer: Path | None, max_file_bytes: int
) -> Iterator[str]:
    """Writes the checkpoint `source` to the new folder `target`; yields lines that describe it.

    `weight_format`: the weights' there (None: as they are). `tokenizer`: one that replaces the checkpoint's own. Beside
    the weights stand the tokenizer's files, and the run's configuration and step. Raises UserError and OSError; the
    folder is complete or doesn't exist.
    """
    refuse_existing(target)
    index = verify_checkpoint(source)
    model = model_config_of(index, source)
    reader, shardings = CheckpointReader(source, index), {sharding.name: sharding for sharding in shardings_of(model)}
    check_shapes(reader, shardings.values())
    stored = [
        StoredTensor(key=name, format=weight_format or _saved_format(sharding, reader), shape=sharding.shape)
        for name, sharding in shardings.items()
    ]
    tokenizer_output = tokenizer_files(reader, model, tokenizer)
    yield f"step {index.step} of {source}, every byte verified: {len(stored)} tensors"
    parts, disk = split_into_files(stored, max_file_bytes), Disk()
    with new_folder(disk, target) as folder:
        yield from write_weight_files(disk, folder, parts, read=lambda name: read_whole(shardings[name], reader))
        facts = {"step": index.step, "config": index.facts.config}
        for name, content in {RUN_CONFIG: facts, **index_file(parts)}.items():
            disk.write_file(folder / name, (json.dumps(content, indent=2) + "\n").encode())
        for name, data in tokenizer_output.files.items():
            disk.write_file(folder / name, data)
    if tokenizer_output.warning:
        yield f"note: {tokenizer_output.warning}"
    yield f"written to {target}: safetensors.torch.load_file reads each file"


def read_whole(sharding: ParamSharding, reader: CheckpointReader) -> Tensor:
    """A whole parameter, in the checkpoint's format."""
    reader.close()  # releases what was read for the previous one
    blocks = [reader.read(WEIGHT, name, (0,) * len(shape), shape) for name, shape in tensors_of(sharding).items()]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=sharding.dim or 0)


def _saved_format(sharding: ParamSharding, reader: CheckpointReader) -> Format:
    return reader.index.tensors[next(iter(tensors_of(sharding)))].kinds[WEIGHT]
