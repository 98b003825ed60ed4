"""Hugging Face's tensors as parts of our parameters, for Llama and GPT-2, in both directions.

A Hugging Face tensor is some rows of one of our global parameters; GPT-2's products are stored transposed, (in, out)::

    ours                        Llama                                  GPT-2
    layers.0.attention.qkv      q_proj: rows of q, k_proj, v_proj      c_attn: all rows, transposed
    layers.0.mlp.gate_up        gate_proj, up_proj                     (mlp.up) c_fc, transposed

`hf_tensors` is that table, `overlaps` cuts it down to what one tensor-parallel rank has; both are pure arithmetic. What
moves tensors takes them one at a time, and reads no more of them than it needs: nothing here needs the whole model.

A Llama with biases on query, key and value is what Hugging Face calls Qwen2: the names are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel3d.config.derived import has_qkv_bias, key_value_size, num_key_value_heads
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import ConfigError, Problem, UserError
from parallel3d.layers.parameter import parameters_of
from parallel3d.parallel.sharding import IndexRun, ParamSharding


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """One tensor of a Hugging Face model: rows `first_row` onwards of our global parameter `name`."""

    hf_name: str
    shape: tuple[int, ...]
    """Hugging Face's."""
    name: str | None
    """Ours. None: the tensor is zeros, which our model does without."""
    first_row: int = 0
    transposed: bool = False

    @property
    def rows(self) -> range:
        """The rows of our parameter."""
        num_rows = self.shape[1] if self.transposed else self.shape[0]
        return range(self.first_row, self.first_row + num_rows)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """`local` of a rank's share is `tensor` of a Hugging Face tensor, transposed where that one is."""

    local: tuple[slice, ...]
    tensor: tuple[slice, ...]


class LazyTensor(Protocol):
    """A tensor, in memory or in a file, of which parts can be had."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor: ...


ReadTensor = Callable[[str], LazyTensor]
"""Gives a Hugging Face tensor by its name."""


def hf_tensors(model: ModelConfig, layers: range | None = None) -> tuple[HfTensor, ...]:
    """The tensors of the Hugging Face model that is the same function; those of a stage if `layers` are given.

    The names are those of LlamaForCausalLM's (Qwen2ForCausalLM's) and GPT2LMHeadModel's state_dict; a tied head is no
    tensor of its own. GPT-2 needs max_position_embeddings resolved. Raises ConfigError for a GPT-2 whose heads share
    keys: there is none there.
    """
    layers = range(model.num_hidden_layers) if layers is None else layers
    family = _Gpt2Names(model) if model.architecture == "gpt2" else _LlamaNames(model)
    is_first, is_last = layers.start == 0, layers.stop == model.num_hidden_layers
    sizes = (model.vocab_size, model.hidden_size)
    embedding = _whole(family.embedding, "embedding.weight", *sizes)
    head = embedding if model.tie_word_embeddings else _whole("lm_head.weight", "head.weight", *sizes)
    first = (embedding, *family.first()) if is_first else ()
    last = family.last() if is_last else ()
    has_own_head = is_last and not (is_first and model.tie_word_embeddings)
    inner = (tensor for index in layers for tensor in family.layer(index))
    return (*first, *inner, *last, *([head] if has_own_head else []))


def overlaps(tensor: HfTensor, sharding: ParamSharding, tp_rank: int, tp_size: int) -> Iterator[Overlap]:
    """What rank `tp_rank` has of `tensor`, in pieces; padding is no part of it, copies are on several ranks."""
    whole = IndexRun(global_start=0, local_start=0, length=sharding.shape[0])
    for run in sharding.runs(tp_rank, tp_size):
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


def read_local_shard(
    sharding: ParamSharding, tensors: Sequence[HfTensor], read: ReadTensor, *, tp_rank: int, tp_size: int
) -> Tensor:
    """This rank's share of a parameter, in the format of the tensors (the widest); zeros for padding.

    Of the tensors that make it up only the rank's parts are read. Raises UserError for a tensor of another shape than
    the configuration asks for.
    """
    mine = [tensor for tensor in tensors if tensor.name == sharding.name]
    assert mine, f"no Hugging Face tensor has a part of {sharding.name}"
    values = [_checked(read(tensor.hf_name), tensor) for tensor in mine]
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    local_shard = torch.zeros(sharding.local_shape(tp_size), dtype=dtype)
    for tensor, value in zip(mine, values):
        for part in overlaps(tensor, sharding, tp_rank, tp_size):
            piece = value[part.tensor]
            local_shard[part.local] = piece.t() if tensor.transposed else piece
    return local_shard


def write_local_shard(
    local_shard: Tensor, sharding: ParamSharding, tensor: HfTensor, out: Tensor, *, tp_rank: int, tp_size: int
) -> None:
    """Writes what this rank has of `tensor` to its place in `out`, the whole of it: the way back of
    `read_local_shard`."""
    for part in overlaps(tensor, sharding, tp_rank, tp_size):
        piece = local_shard[part.local]
        out[part.tensor] = piece.t() if tensor.transposed else piece


@torch.no_grad()
def load_stage(stage: nn.Module, tensors: Sequence[HfTensor], read: ReadTensor, *, tp_rank: int, tp_size: int) -> None:
    """Fills the parameters of a stage, at any tensor-parallel size and with any layers, in the parameters' format.

    `tensors` may be those of the whole model. Raises UserError for a tensor of a wrong shape, or which ours takes for
    zeros and which is not.
    """
    for parameter in parameters_of(stage):
        local_shard = read_local_shard(parameter.sharding, tensors, read, tp_rank=tp_rank, tp_size=tp_size)
        parameter.copy_(local_shard)
    check_zeros(tensors, read)


def check_zeros(tensors: Sequence[HfTensor], read: ReadTensor) -> None:
    """Raises UserError for a tensor that our model takes for zeros and which is not."""
    for tensor in tensors:
        if tensor.name is None and _checked(read(tensor.hf_name), tensor)[(slice(None),)].any():
            raise UserError(f"{tensor.hf_name} is not zero, but model.qkv_bias is false: set it to true")


class _LlamaNames:
    embedding = "model.embed_tokens.weight"

    def __init__(self, model: ModelConfig):
        self._model = model

    def first(self) -> Iterator[HfTensor]:
        return iter(())

    def layer(self, index: int) -> Iterator[HfTensor]:
        model, ours, theirs = self._model, f"layers.{index}", f"model.layers.{index}"
        hidden, inner, key_value = model.hidden_size, model.intermediate_size, key_value_size(model)
        heads = {"self_attn.q_proj": hidden, "self_attn.k_proj": key_value, "self_attn.v_proj": key_value}
        yield _whole(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", hidden)
        yield from _stacked(theirs, heads, "weight", f"{ours}.attention.qkv.weight", hidden)
        if has_qkv_bias(model):
            yield from _stacked(theirs, heads, "bias", f"{ours}.attention.qkv.bias")
        yield _whole(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.output.weight", hidden, hidden)
        yield _whole(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", hidden)
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        yield from _stacked(theirs, gate_up, "weight", f"{ours}.mlp.gate_up.weight", hidden)
        yield _whole(f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.down.weight", hidden, inner)

    def last(self) -> Iterator[HfTensor]:
        yield _whole("model.norm.weight", "final_norm.weight", self._model.hidden_size)


class _Gpt2Names:
    embedding = "transformer.wte.weight"

    def __init__(self, model: ModelConfig):
        if num_key_value_heads(model) != model.num_attention_heads:
            raise ConfigError(
                [
                    Problem(
                        field="model.num_key_value_heads",
                        value=model.num_key_value_heads,
                        rule="Hugging Face's GPT-2 has one key-value head for each query head",
                        fix=f"Such a model has no form there; it would need {model.num_attention_heads}",
                    )
                ]
            )
        self._model = model

    def first(self) -> Iterator[HfTensor]:
        model = self._model
        assert model.max_position_embeddings is not None, "needs a resolved configuration"
        yield _whole("transformer.wpe.weight", "positions.weight", model.max_position_embeddings, model.hidden_size)

    def layer(self, index: int) -> Iterator[HfTensor]:
        model, ours, theirs = self._model, f"layers.{index}", f"transformer.h.{index}"
        hidden, inner = model.hidden_size, model.intermediate_size
        for hf_name, name in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            for part in ("weight", "bias"):
                yield _whole(f"{theirs}.{hf_name}.{part}", f"{ours}.{name}.{part}", hidden)
        for hf_name, name, size_in, size_out in (
            ("attn.c_attn", "attention.qkv", hidden, 3 * hidden),
            ("attn.c_proj", "attention.output", hidden, hidden),
            ("mlp.c_fc", "mlp.up", hidden, inner),
            ("mlp.c_proj", "mlp.down", inner, hidden),
        ):
            shape = (size_in, size_out)
            yield HfTensor(
                hf_name=f"{theirs}.{hf_name}.weight", shape=shape, name=f"{ours}.{name}.weight", transposed=True
            )
            has_bias = has_qkv_bias(model) or name != "attention.qkv"
            yield HfTensor(
                hf_name=f"{theirs}.{hf_name}.bias", shape=(size_out,), name=f"{ours}.{name}.bias" if has_bias else None
            )

    def last(self) -> Iterator[HfTensor]:
        for part in ("weight", "bias"):
            yield _whole(f"transformer.ln_f.{part}", f"final_norm.{part}", self._model.hidden_size)


def _whole(hf_name: str, name: str, *shape: int) -> HfTensor:
    return HfTensor(hf_name=hf_name, shape=shape, name=name)


def _stacked(prefix: str, sizes: Mapping[str, int], part: str, name: str, *columns: int) -> Iterator[HfTensor]:
    """Tensors that stand one under the other in our parameter."""
    row = 0
    for hf_name, size in sizes.items():
        yield HfTensor(hf_name=f"{prefix}.{hf_name}.{part}", shape=(size, *columns), name=name, first_row=row)
        row += size


def _checked(value: LazyTensor, tensor: HfTensor) -> LazyTensor:
    if tuple(value.shape) != tensor.shape:
        raise UserError(
            f"{tensor.hf_name} has the shape {tuple(value.shape)}; the configuration's model asks for {tensor.shape}"
        )
    return value
