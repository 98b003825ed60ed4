"""Reads a rank's part of a checkpoint, whatever layout wrote it: slices, straight from the files that hold them.

Values are converted to the requested format: exactly from a narrower one (bf16 -> fp32), rounded to the nearest from a
wider one (fp32 -> bf16_sr). A policy with master weights reads those and rounds its weights from them, as in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel3d.checkpoint.index import WEIGHT, Index, key_of
from parallel3d.checkpoint.snapshot import bucket_tensor_chunks
from parallel3d.checkpoint.tensor_chunks import IntTuple, overlap, tensor_chunks_of, tensors_of
from parallel3d.errors import CheckpointError
from parallel3d.optim.bucket import Bucket
from parallel3d.optim.bucket_plan import ParamSlot
from parallel3d.optim.state_shard import Shard
from parallel3d.parallel.sharding import ParamSharding, TpShard


class CheckpointReader:
    """One checkpoint, open for reading; each file is opened on first use."""

    def __init__(self, folder: Path, index: Index):
        self.folder = folder
        self.index = index
        self._open: dict[str, Any] = {}

    def read(self, kind: str, tensor: str, start: IntTuple, shape: IntTuple) -> Tensor:
        """Reads a rectangle of a tensor, in the format in which it was saved.

        Raises CheckpointError if the checkpoint lacks it or a file contradicts the index.
        """
        known = self.index.tensors.get(tensor)
        if known is None or kind not in known.kinds:
            raise CheckpointError(f"{self.folder} holds no {kind} of {tensor}")
        whole, num_found = None, 0
        for tensor_chunk in known.pieces:
            if (common := overlap(start, shape, tensor_chunk.start, tensor_chunk.shape)) is None:
                continue
            first, size = common
            values = self._slice(
                tensor_chunk.file,
                key_of(kind, tensor, tensor_chunk.start),
                tensor_chunk.shape,
                tensor_chunk.start,
                first,
                size,
            )
            if size == shape:
                return values
            whole = values.new_empty(shape) if whole is None else whole
            whole[tuple(slice(a - b, a - b + n) for a, b, n in zip(first, start, size))] = values
            num_found += values.numel()
        if whole is None or num_found != whole.numel():
            raise CheckpointError(f"{self.folder} lacks {kind} of {tensor} from {start}, {shape}")
        return whole

    def whole(self, kind: str, tensor: str) -> Tensor:
        """Reads a whole tensor."""
        shape = self.index.tensors[tensor].shape
        return self.read(kind, tensor, (0,) * len(shape), shape)

    def side_files(self) -> dict[str, bytes]:
        """The files that accompany the weights, by name: the tokenizer."""
        shards = {tensor_chunk.file for tensor in self.index.tensors.values() for tensor_chunk in tensor.pieces}
        names = (file.name for file in self.index.files if file.name not in shards)
        return {name: (self.folder / name).read_bytes() for name in names}

    def close(self) -> None:
        """Closes all files; their pages no longer count as this process's memory."""
        self._open.clear()

    def _slice(self, file: str, key: str, shape: IntTuple, start: IntTuple, first: IntTuple, size: IntTuple) -> Tensor:
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            stored = self._open[file].get_slice(key)
            if tuple(stored.get_shape()) != shape:
                raise CheckpointError(f"{path} is damaged: {key} has shape {stored.get_shape()}, not {shape}")
            return stored[tuple(slice(a - b, a - b + n) for a, b, n in zip(first, start, size))]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None


@torch.no_grad()
def load_shard(
    reader: CheckpointReader,
    bucket: Bucket,
    span: range,
    *,
    tp: TpShard,
    kinds: Sequence[str] | None = None,
) -> Shard:
    """Loads a range of optimizer state; padding is zero, and so are states that are not among the `kinds` to read
    (None: all)."""
    check_shapes(reader, [parameter.sharding for parameter in bucket.parameters])
    shard = bucket.empty_shard(span)
    shard.states.zero_()
    known = (WEIGHT, *bucket.rule.state_kinds())
    every = zip(known, (shard.master, *shard.states))
    states = [(kind, state) for kind, state in every if kinds is None or kind in kinds]
    for tensor_chunk in bucket_tensor_chunks(bucket, span, tp=tp, with_copies=True):
        for kind, state in states:
            values = reader.read(kind, tensor_chunk.tensor, tensor_chunk.start, tensor_chunk.shape)
            torch.as_strided(
                state,
                tensor_chunk.shape,
                tensor_chunk.strides,
                state.storage_offset() + tensor_chunk.offset - span.start,
            ).copy_(values)
    return shard


@torch.no_grad()
def load_weight(reader: CheckpointReader, sharding: ParamSharding, *, tp: TpShard) -> Tensor:
    """Loads a tensor-parallel rank's part of a parameter, in the checkpoint's format; padding is zero."""
    check_shapes(reader, [sharding])
    param_slot = ParamSlot(name=sharding.name, offset=0, shape=sharding.local_shape(tp.size))
    share: Tensor | None = None
    for tensor_chunk in tensor_chunks_of(sharding, param_slot, range(param_slot.length), tp=tp, with_copies=True):
        values = reader.read(WEIGHT, tensor_chunk.tensor, tensor_chunk.start, tensor_chunk.shape)
        share = values.new_zeros(param_slot.shape) if share is None else share
        torch.as_strided(share, tensor_chunk.shape, tensor_chunk.strides, tensor_chunk.offset).copy_(values)
    return torch.zeros(param_slot.shape) if share is None else share


def check_states(reader: CheckpointReader, buckets: Iterable[Bucket]) -> None:
    """Raises CheckpointError if the checkpoint lacks a state of the update rule."""
    for bucket in buckets:
        wanted = set(bucket.rule.state_kinds())
        names = (name for parameter in bucket.parameters for name in tensors_of(parameter.sharding))
        for name in names:
            tensor = reader.index.tensors.get(name)
            if tensor is not None and not tensor.kinds.keys() >= wanted:
                there, needed = (", ".join(sorted(kinds - {WEIGHT})) for kinds in (tensor.kinds.keys(), wanted))
                raise CheckpointError(
                    f"{reader.folder} was saved with another update rule: of {name} it holds {there}, and"
                    f" {bucket.rule.name} needs {needed}. Set optimizer.kind as it was, or begin a new run from"
                    " its weights (run.initialize_from)"
                )


def check_shapes(reader: CheckpointReader, shardings: Iterable[ParamSharding]) -> None:
    """Raises CheckpointError if the checkpoint lacks a parameter or has it in another shape."""
    for sharding in shardings:
        for name, shape in tensors_of(sharding).items():
            known = reader.index.tensors.get(name)
            if known is None or known.shape != shape:
                there = "is not there" if known is None else f"has shape {known.shape}"
                raise CheckpointError(f"{reader.folder} is of another model: {name} {there}, this one's is {shape}")
