"""Makes a user's torch.nn.Module a part of a stage: its weights become sharded parameters with gradient sinks.

A linear layer that is declared `Column` or `Row` is replaced by ours, and so is every Dropout. Every other parameter
keeps its place; autograd hands its gradient over once in each backward pass.

The initial values are the module's own: it is built under a seed that depends on run.seed and the part's name, whole,
in fp32, and each rank keeps its share. So a part begins alike on every layout.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from parallel3d.data.marked_text import IGNORED
from parallel3d.errors import UserCodeError, UserError
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.models.user_calls import (
    KeyedDropout,
    PartCall,
    RandomNumbersRefused,
    document_arguments,
    recompute_module,
    replace_dropouts,
)
from parallel3d.models.user_parts import (
    DOCUMENT_ARGUMENTS,
    Column,
    Divided,
    Partial,
    Row,
    Sharding,
    Whole,
    as_module,
    check_hooks,
    user_code,
)
from parallel3d.parallel.sharding import FusedBlock, ParamSharding
from parallel3d.random_keys import key_of

_seeded = threading.Lock()
"""Held while torch's random numbers are seeded: ranks may be threads of one process."""


class DividedLinear(nn.Module):
    """(..., in) -> (..., out) by a column- or row-parallel linear layer; either side is this rank's part."""

    def __init__(self, linear: ColumnParallelLinear | RowParallelLinear, call: PartCall):
        super().__init__()
        self.linear, self.call = linear, call

    def forward(self, x: Tensor) -> Tensor:
        assert self.call.micro_batch is not None
        if x.shape[-1] != self.linear.weight.shape[1]:
            raise ValueError(f"an input of width {x.shape[-1]}, not {self.linear.weight.shape[1]}, on this rank")
        return self.linear(x.flatten(0, -2), self.call.micro_batch).view(*x.shape[:-1], -1)


class UserPart(nn.Module):
    """A part of a user's model, with sharded parameters under global names that begin with `name`."""

    uses_parameters_below = True
    """Its code may read a weight of any module in it."""

    def __init__(
        self,
        name: str,
        make: Callable[[], nn.Module],
        *,
        shardings: Mapping[str, Sharding],
        context: LayerContext,
        seed: int,
        function: str,
    ):
        super().__init__()
        self.name, self.function, self.context = name, function, context
        self.is_token_table = not name.startswith("layers.")
        with user_code(function):
            made = _build_module(make, key_of("module", seed, name).first, _building_devices(context))
        self.call, self._shardings = PartCall(context), shardings
        self.part = replace_dropouts(as_module(made, name), partial(self._keyed_dropout, name))
        for path, sharding in shardings.items():
            if isinstance(sharding, Divided | Whole):
                self._check_dropout(name, path)
        self._values: dict[int, ShardedParameter] = {}
        for path, sharding in shardings.items():
            if isinstance(sharding, Column | Row):
                self._replace_linear(name, path, sharding)
        partial_paths = tuple(path for path, sharding in shardings.items() if isinstance(sharding, Partial))
        self._take_parameters(name, partial_paths)
        del self._values
        self.part.to(torch.device(context.device))  # its buffers; the parameters are there
        self._asks_for = self.accepts & DOCUMENT_ARGUMENTS
        self._is_known = False
        """Whether a training pass has shown that its code draws no random numbers of torch's."""

    def run(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The part's result for x, which has the shape that the user's code expects."""
        self.call.begin(micro_batch)
        asked = document_arguments(micro_batch, x.device) if self._asks_for else {}
        arguments = {name: asked[name] for name in self._asks_for}
        with user_code(self.function), nullcontext() if self._is_known else RandomNumbersRefused():
            found = self.part(x, **arguments)
        self._is_known = self._is_known or micro_batch.training
        return found

    @property
    def accepts(self) -> set[str]:
        """The names of the arguments of the user's forward."""
        return set(signature(type(self.part).forward).parameters)

    def saved_buffers(self) -> dict[str, Tensor]:
        """The buffers that the part's state_dict holds, by global name."""
        parameters = {path for path, _ in self.part.named_parameters(remove_duplicate=False)}
        held = self.part.state_dict().items()
        return {
            f"{self.name}.{path}": value for path, value in held if path not in parameters and torch.is_tensor(value)
        }

    def recompute(self, paths: tuple[str, ...], name: str) -> None:
        """Has the modules at these paths computed again in the backward pass."""
        for path in paths:
            module = self._find(name, path, "recomputed")
            if not isinstance(module, nn.Module):
                raise UserError(f"model.module: recomputed has {path}, which is not a module")
            recompute_module(module, self.call)

    def _keyed_dropout(self, name: str, path: str, probability: float) -> KeyedDropout:
        declared = self._shardings.get(path)
        if declared is None and self._shardings and self.context.tp.group.size > 1:
            raise UserError(
                f"model.module: {name}.{path} is a Dropout, and shardings must say of what: {path!r}: Whole() if every"
                " rank has all of its input, Divided(dim) if tensor-parallel ranks have parts of dimension dim"
            )
        dim = declared.dim if isinstance(declared, Divided) else None
        return KeyedDropout(probability, self.call, part=name, path=path, divided_dim=dim)

    def _check_dropout(self, name: str, path: str) -> None:
        found = self._find(name, path)
        if not isinstance(found, KeyedDropout | nn.Dropout):
            kind = type(found).__name__
            raise UserError(f"model.module: shardings has {path}, which is {kind}, not torch.nn.Dropout")

    def _replace_linear(self, name: str, path: str, sharding: Column | Row) -> None:
        """Puts our linear layer in the place of the user's."""
        old = self._find(name, path)
        if type(old) is not nn.Linear:
            raise UserError(f"model.module: shardings has {path}, which is {type(old).__name__}, not torch.nn.Linear")
        check_hooks(old, f"model.module: {name}.{path}")
        full, sizes, tp_size = f"{name}.{path}", (old.in_features, old.out_features), self.context.tp.group.size
        options: Any = dict(init_std=0.02, bias=old.bias is not None, context=self.context)
        blocks = sharding.blocks or sizes[1:] if isinstance(sharding, Column) else sizes[:1]
        if isinstance(sharding, Column) and sum(blocks) != old.out_features:
            raise UserError(f"model.module: the blocks {blocks} of {path} don't add up to {old.out_features} outputs")
        if wrong := [size for size in blocks if size % tp_size]:
            raise UserError(
                f"model.module: {path} has a block of {wrong[0]}, no multiple of parallel.tp_size {tp_size}"
            )
        new: ColumnParallelLinear | RowParallelLinear
        if isinstance(sharding, Column):
            stem = path.rpartition(".")[2]  # in checkpoints a block's name takes the place of the module's
            names = [f"{stem}_{number}" for number in range(len(blocks))] if len(blocks) > 1 else [stem]
            fused = tuple(FusedBlock(name=block, size=size) for block, size in zip(names, blocks))
            new = ColumnParallelLinear(full, old.in_features, fused, **options)
        else:
            new = RowParallelLinear(full, *sizes, **options)
        for attribute, parameter in new.named_parameters(recurse=False):
            assert isinstance(parameter, ShardedParameter)
            self._set_first_value(parameter, getattr(old, attribute))
        parent, _, child = path.rpartition(".")
        setattr(self.part.get_submodule(parent), child, DividedLinear(new, self.call))

    def _take_parameters(self, name: str, partial_paths: tuple[str, ...]) -> None:
        """Makes all other parameters sharded ones, of which each rank has all."""
        for path in partial_paths:
            self._find(name, path)
        owners = list(self.part.named_modules())
        uses = Counter(id(p) for _, module in owners for p in module.parameters(recurse=False))
        for path, module in owners:
            for attribute, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, ShardedParameter):
                    continue
                local = f"{path}.{attribute}" if path else attribute
                is_partial = any(f"{local}.".startswith(f"{each}.") for each in partial_paths)
                if id(parameter) not in self._values:
                    self._values[id(parameter)] = self._shared(f"{name}.{local}", parameter, is_partial, uses)
                module._parameters[attribute] = self._values[id(parameter)]

    def _shared(self, name: str, value: nn.Parameter, is_partial: bool, uses: Counter[int]) -> ShardedParameter:
        if not value.dim():
            raise UserError(f"model.module: {name} is a single number: give it a dimension, as in torch.ones(1)")
        sharding = ParamSharding(
            name=name,
            shape=tuple(value.shape),
            partial_grad=is_partial and self.context.tp.group.size > 1,
            is_norm_or_bias=value.dim() < 2,
            is_token_table=self.is_token_table,
        )
        parameter = self.context.parameter(sharding)
        self._set_first_value(parameter, value)
        parameter.register_post_accumulate_grad_hook(partial(_hand_over, num_uses=uses[id(value)]))
        return parameter

    def _set_first_value(self, parameter: ShardedParameter, value: Tensor) -> None:
        """Keeps this rank's share of the value with which the module was built."""
        if parameter.device.type == "meta":
            return
        sharding, whole = parameter.sharding, value.detach().float()
        share = whole.new_zeros(parameter.shape)
        for run in sharding.runs(self.context.tp.shard):
            if sharding.dim is None:
                share.copy_(whole)
            else:
                part = whole.narrow(sharding.dim, run.global_start, run.length)
                share.narrow(sharding.dim, run.local_start, run.length).copy_(part)
        parameter.first_value = share

    def _find(self, name: str, path: str, where: str = "shardings") -> Any:
        """The module or parameter that `shardings` or `recomputed` names."""
        found: Any = self.part
        for attribute in path.split("."):
            found = getattr(found, attribute, None)
            if found is None:
                known = ", ".join(known for known, _ in self.part.named_parameters())
                raise UserError(f"model.module: {where} has {path}, which {name} has not; its weights are {known}")
        return found


class UserBlock(UserPart):
    """x (tokens, hidden) -> the shape of x."""

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        found = self.run(_in_sequences(x, micro_batch), micro_batch)
        _check_shape(self.function, "a block", found, (*_sequences(micro_batch), x.shape[1]))
        return found.flatten(0, 1).to(x.dtype)


class UserEmbedding(UserPart):
    """Token ids (tokens,) -> (tokens, hidden)."""

    def forward(self, tokens: Tensor, micro_batch: MicroBatch, hidden_size: int) -> Tensor:
        found = self.run(_in_sequences(tokens, micro_batch), micro_batch)
        _check_shape(self.function, "the embedding", found, (*_sequences(micro_batch), hidden_size))
        return found.flatten(0, 1).to(self.context.policy.compute)


class UserHead(UserPart):
    """x (tokens, hidden), targets (tokens,) -> the sum of the token losses, a float64 scalar."""

    def forward(self, x: Tensor, targets: Tensor, micro_batch: MicroBatch, vocab_size: int) -> Tensor:
        logits = self.logits(x, micro_batch, vocab_size)
        losses = functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        return _ScaledSum.apply(losses, micro_batch.loss_factor)

    def logits(self, x: Tensor, micro_batch: MicroBatch, vocab_size: int) -> Tensor:
        """(tokens, vocab_size) in the format of norms and losses."""
        found = self.run(_in_sequences(x, micro_batch), micro_batch)
        _check_shape(self.function, "the head", found, (*_sequences(micro_batch), vocab_size))
        return found.flatten(0, 1).to(self.context.policy.keep_fp32_dtype)


class _ScaledSum(Function):
    """The loss itself, whose gradient begins with `factor`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.dtype = factor, loss.dtype
        return loss.double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.factor).to(ctx.dtype), None


def _hand_over(parameter: Tensor, num_uses: int) -> None:
    """Adds the gradient that autograd has summed over all uses to the main gradient."""
    assert isinstance(parameter, ShardedParameter)
    if parameter.grad is None:
        raise UserCodeError(
            f"model.module: {parameter.sharding.name} has got no gradient: the backward of an autograd function of"
            " yours returns None for what depends on it. Return zeros, or detach() its input"
        )
    sink, grad, parameter.grad = parameter.sink, parameter.grad, None
    sink.add(grad)
    for _ in range(num_uses - 1):  # the optimizer counts the modules that hold it
        sink.on_added()


def _sequences(micro_batch: MicroBatch) -> tuple[int, int]:
    return micro_batch.batch_size, micro_batch.sequence_length


def _in_sequences(x: Tensor, micro_batch: MicroBatch) -> Tensor:
    return x.view(*_sequences(micro_batch), *x.shape[1:])


def _check_shape(function: str, what: str, found: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(found, Tensor) or tuple(found.shape) != shape:
        text = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"model.module {function}: {what} returned {text}, not a tensor {shape}")


def _building_devices(context: LayerContext) -> tuple[str, ...]:
    """Where the user's code makes the module, by preference: on the CPU, unless only its shapes are asked for. Code
    that computes with values, such as `torch.linspace(0, 1, 4).tolist()`, fails on "meta", and not on the CPU."""
    return ("meta", "cpu") if torch.device(context.device).type == "meta" else ("cpu",)


def _build_module(make: Callable[[], Any], seed: int, devices: tuple[str, ...]) -> Any:
    """What `make` makes under `seed`, on the first of `devices` on which it does not fail; raises what the last one
    raises."""
    *others, last = devices
    for device in others:
        with suppress(Exception):
            return _build_on(device, make, seed)
    return _build_on(last, make, seed)


def _build_on(device: str, make: Callable[[], Any], seed: int) -> Any:
    with _seeded, torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return make()
