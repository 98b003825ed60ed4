"""A user's own layers, and how their weights are sharded: returned by the function that `model.module` names.

    def build(model):                      # the resolved section `model`
        return ModelParts(
            block=lambda index: Block(model),
            shardings={"attention.qkv": Column((256, 128, 128)), "attention.output": Row()},
        )

docs/python.md describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from parallel3d.config.schema import ModelConfig
from parallel3d.errors import UserError
from parallel3d.user_code import check_call, errors_named, load_object


@dataclass(frozen=True)
class Column:
    """An nn.Linear whose outputs are divided over the tensor-parallel ranks, inside each of `blocks`.

    blocks: the sizes of the parts of which its output is made, such as (queries, keys, values); none: one part.
    """

    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """An nn.Linear whose inputs are divided over the tensor-parallel ranks; its outputs are summed over them."""


@dataclass(frozen=True)
class Partial:
    """Weights that every rank has, but applies to divided activations only: their gradients are summed."""


@dataclass(frozen=True)
class Divided:
    """A torch.nn.Dropout that is applied to divided activations: of dimension `dim` each rank has an equal part."""

    dim: int = -1


@dataclass(frozen=True)
class Whole:
    """A torch.nn.Dropout that is applied to activations that every rank has whole."""


Sharding = Column | Row | Partial | Divided | Whole


DOCUMENT_ARGUMENTS = frozenset(("positions", "documents"))
"""Those of a part's forward, by name, beside its input."""
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a parameter keeps its hooks."""
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class ModelParts:
    """The parts of a decoder. Each is a function that makes a torch.nn.Module, called where the part is needed.

    Activations are (sequences, length, hidden_size).
    """

    block: Callable[[int], nn.Module]
    """Makes block `index`, of model.num_hidden_layers: x -> the shape of x. The forward of a part also gets `positions`
    and `documents`, if it has arguments of these names."""
    embedding: Callable[[], nn.Module] | None = None
    """(sequences, length) int64 -> x. None: model.vocab_size rows, divided over the tensor-parallel ranks."""
    head: Callable[[], nn.Module] | None = None
    """x -> logits (sequences, length, vocab_size). None: a norm and a linear layer, divided in the same way."""
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    """By the name of a module in a block, such as "attention.qkv". All else is the same on every rank."""
    recomputed: tuple[str, ...] = ()
    """Names of modules in a block that parallel.recompute selective computes again in the backward pass."""


def load_parts(model: ModelConfig) -> ModelParts:
    """The parts that `model.module` makes. Raises UserError."""
    assert model.module is not None
    function = load_object(model.module, field="model.module")
    check_call(function, model, what=f"model.module {model.module}")
    with user_code(model.module):
        parts = function(model)
    if not isinstance(parts, ModelParts):
        raise UserError(f"model.module {model.module} returned {type(parts).__name__}, not parallel3d.ModelParts")
    if model.tie_word_embeddings and (parts.embedding or parts.head):
        raise UserError(
            f"model.module {model.module} has an embedding or a head of its own, which model.tie_word_embeddings can't"
            " tie: set it to false"
        )
    for name, make, *arguments in (("block", parts.block, 0), ("embedding", parts.embedding), ("head", parts.head)):
        if make is not None or name == "block":
            check_call(make, *arguments, what=f"model.module {model.module}: {name}")
    return parts


def user_code(function: str) -> AbstractContextManager[None]:
    """Names the user's file and line in an error of the function's, or of what it has made."""
    return errors_named(f"model.module {function}")


def as_module(made: Any, what: str) -> nn.Module:
    """The module that a user's function has made. Raises UserError for what would not train alike on every layout."""
    if not isinstance(made, nn.Module):
        raise UserError(f"model.module: {what} is {type(made).__name__}, not a torch.nn.Module")
    if getattr(made.forward, "__func__", None) is nn.Module.forward:
        raise UserError(f"model.module: {what} ({type(made).__name__}) has no method forward")
    asked = dict.fromkeys(DOCUMENT_ARGUMENTS & set(signature(type(made).forward).parameters))
    check_call(made.forward, None, what=f"model.module: {what}", **asked)
    for path, module in made.named_modules():
        where = f"model.module: {what}{path and f'.{path}'}"
        if isinstance(module, _DropoutNd) and type(module) is not nn.Dropout and module.p > 0:
            kind = type(module).__name__
            raise UserError(
                f"{where} ({kind}) drops by torch's random numbers, which differ between layouts: use torch.nn.Dropout,"
                " which is replaced, or set its p to 0"
            )
        if type(module) is nn.Dropout:
            check_hooks(module, where)
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                raise UserError(f"{where}.{name} is a frozen parameter: make it a buffer (register_buffer)")
            if any(getattr(parameter, hooks, None) for hooks in HOOKS):
                raise UserError(
                    f"{where}.{name} has a hook, which would be lost: other tensors are trained in its place. Hook the"
                    " output of the module instead, in its forward"
                )
    return made


def check_hooks(module: nn.Module, where: str) -> None:
    """Raises UserError for a module with hooks, of which another one takes the place."""
    if any(getattr(module, hooks) for hooks in MODULE_HOOKS):
        raise UserError(
            f"{where} ({type(module).__name__}) has a hook, which would be lost: another module takes its place. Hook"
            " the module around it instead"
        )
