"""Maps Hugging Face's tensors to parts of our parameters, in both directions.

A Hugging Face tensor is some rows of one of our global parameters; GPT-2 style models store products transposed::

    ours                        one name for each fused block          one name, transposed
    layers.0.attention.qkv      q_proj: rows of q, k_proj, v_proj      c_attn: all rows
    layers.0.mlp.gate_up        gate_proj, up_proj                     (mlp.up) c_fc

The names are the family's (parallel3d/families). `hf_tensors` makes the table of a model from them, `overlaps` cuts it
down to one tensor-parallel rank; both are pure arithmetic. Tensors are moved one at a time, and only the parts that are
needed are read: the whole model is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel3d.config.schema import ModelConfig
from parallel3d.errors import UserError
from parallel3d.families.spec import HfModel
from parallel3d.layers.parameter import parameters_of
from parallel3d.models.hf_config import hf_model_of
from parallel3d.models.make import shardings_of
from parallel3d.parallel.sharding import IndexRun, ParamSharding, TpShard


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """One tensor of a Hugging Face model: rows `first_row` onwards of our global parameter `name`."""

    hf_name: str
    shape: tuple[int, ...]
    """Hugging Face's."""
    name: str | None
    """Ours. None: the tensor is zeros, and our model has no such parameter."""
    first_row: int = 0
    transposed: bool = False

    @property
    def rows(self) -> range:
        """The rows of our parameter."""
        num_rows = self.shape[1] if self.transposed else self.shape[0]
        return range(self.first_row, self.first_row + num_rows)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """`local` of a rank's shard equals `tensor` of a Hugging Face tensor, transposed where that one is."""

    local: tuple[slice, ...]
    tensor: tuple[slice, ...]


class LazyTensor(Protocol):
    """A tensor in memory or in a file; indexing reads a part of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor: ...


ReadTensor = Callable[[str], LazyTensor]
"""Gives a Hugging Face tensor by its name."""


def hf_tensors(model: ModelConfig) -> tuple[HfTensor, ...]:
    """The tensors of the Hugging Face model that is the same function, by the names of its state_dict.

    A tied head is not a tensor of its own. Learned positions need max_position_embeddings resolved. Raises ConfigError
    where Hugging Face has no such model.
    """
    hf, shardings = hf_model_of(model), shardings_of(model)
    known = {sharding.name for sharding in shardings}
    return tuple(tensor for sharding in shardings for tensor in _tensors_of(sharding, hf, is_known=known.__contains__))


def _tensors_of(sharding: ParamSharding, hf: HfModel, *, is_known: Callable[[str], bool]) -> Iterator[HfTensor]:
    """The tensors that make up one of our parameters; after a weight the zeros that stand for the bias ours lacks."""
    module, _, part = sharding.name.rpartition(".")
    index = next((number for number in module.split(".") if number.isdigit()), "")
    pattern = module.replace(f".{index}.", ".{}.") if index else module
    names = hf.weights[pattern]
    num_rows, *columns = sharding.shape
    sizes = [num_rows] if isinstance(names, str) else [block.size for block in sharding.fused_blocks]
    transposed = hf.transposed and bool(index) and bool(columns)
    first_row = 0
    for hf_module, size in zip([names] if isinstance(names, str) else names, sizes, strict=True):
        shape = (*columns, size) if transposed else (size, *columns)
        hf_name = f"{hf_module.format(index)}.{part}"
        yield HfTensor(hf_name=hf_name, shape=shape, name=sharding.name, first_row=first_row, transposed=transposed)
        if pattern in hf.zero_biases and part == "weight" and not is_known(f"{module}.bias"):
            yield HfTensor(hf_name=f"{hf_module.format(index)}.bias", shape=(size,), name=None)
        first_row += size


def overlaps(tensor: HfTensor, sharding: ParamSharding, tp: TpShard) -> Iterator[Overlap]:
    """The pieces of `tensor` that a rank holds, without padding; several ranks may hold copies."""
    whole = IndexRun(global_start=0, local_start=0, length=sharding.shape[0])
    for run in sharding.runs(tp):
        rows = whole if sharding.dim == 1 else run
        first = max(rows.global_start, tensor.rows.start)
        last = min(rows.global_start + rows.length, tensor.rows.stop)
        if first >= last:
            continue
        shift = rows.local_start - rows.global_start
        local = [slice(first + shift, last + shift)]
        there = [slice(first - tensor.first_row, last - tensor.first_row)]
        if len(sharding.shape) > 1:
            columns = run if sharding.dim == 1 else IndexRun(global_start=0, local_start=0, length=sharding.shape[1])
            local.append(slice(columns.local_start, columns.local_start + columns.length))
            there.append(slice(columns.global_start, columns.global_start + columns.length))
        yield Overlap(local=tuple(local), tensor=tuple(reversed(there) if tensor.transposed else there))


def read_local_shard(sharding: ParamSharding, tensors: Sequence[HfTensor], read: ReadTensor, *, tp: TpShard) -> Tensor:
    """This rank's shard of a parameter in the tensors' format (the widest); zeros for padding.

    Reads only the rank's parts of the tensors. Raises UserError for a tensor whose shape is not the configuration's.
    """
    mine = [tensor for tensor in tensors if tensor.name == sharding.name]
    assert mine, f"no Hugging Face tensor has a part of {sharding.name}"
    values = [_checked(read(tensor.hf_name), tensor) for tensor in mine]
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    local_shard = torch.zeros(sharding.local_shape(tp.size), dtype=dtype)
    for tensor, value in zip(mine, values):
        for part in overlaps(tensor, sharding, tp):
            piece = value[part.tensor]
            local_shard[part.local] = piece.t() if tensor.transposed else piece
    return local_shard


def write_local_shard(
    local_shard: Tensor, sharding: ParamSharding, tensor: HfTensor, out: Tensor, *, tp: TpShard
) -> None:
    """Writes this rank's part of `tensor` into `out`, the whole tensor: the inverse of `read_local_shard`."""
    for part in overlaps(tensor, sharding, tp):
        piece = local_shard[part.local]
        out[part.tensor] = piece.t() if tensor.transposed else piece


@torch.no_grad()
def load_stage(stage: nn.Module, tensors: Sequence[HfTensor], read: ReadTensor, *, tp: TpShard) -> None:
    """Fills the parameters of a stage, at any tensor-parallel size and with any layers, in the parameters' format.

    `tensors` may be those of the whole model. Raises UserError for a wrong shape, and for a tensor that our model
    takes for zeros and that is not zero.
    """
    for parameter in parameters_of(stage):
        local_shard = read_local_shard(parameter.sharding, tensors, read, tp=tp)
        parameter.copy_(local_shard)
    check_zeros(tensors, read)


def check_zeros(tensors: Sequence[HfTensor], read: ReadTensor) -> None:
    """Raises UserError for a tensor that our model takes for zeros and that is not zero."""
    for tensor in tensors:
        if tensor.name is None and _checked(read(tensor.hf_name), tensor)[(slice(None),)].any():
            raise UserError(f"{tensor.hf_name} is not zero, but model.qkv_bias is false: set it to true")


def _checked(value: LazyTensor, tensor: HfTensor) -> LazyTensor:
    if tuple(value.shape) != tensor.shape:
        raise UserError(
            f"{tensor.hf_name} has the shape {tuple(value.shape)}; the configuration's model asks for {tensor.shape}"
        )
    return value
