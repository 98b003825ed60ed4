"""The row that defines a model family: its blocks, its own fields, and what Hugging Face calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel3d.config.sections.section import Section
from parallel3d.errors import Problem
from parallel3d.families.block_kinds import BlockKind, Mlp, Norm, Positions, QkNorm, Values

JsonFields = dict[str, Any]
"""Fields of a Hugging Face config.json."""


def _no_problems(model: Values) -> Iterable[Problem]:
    return ()


def _no_fields(model: Values) -> JsonFields:
    return {}


def _as_they_are(fields: JsonFields) -> JsonFields:
    return fields


@dataclass(frozen=True, kw_only=True)
class LocalLayers:
    """Layers that differ from those between them: only they have the window, and their rotary positions have a base of
    their own and no scaling."""

    every_field: str
    """The field with n: each n-th layer, counted from 1, is not local."""
    theta_field: str | None = None
    """The field with the base of the local layers; None: that of all layers."""


@dataclass(frozen=True, kw_only=True)
class HfModel:
    """One of Hugging Face's model types: its config.json, and the names of its weights.

    `weights` maps our modules to theirs; "{}" stands for a layer's index. One name is a tensor of the whole parameter.
    Several are one tensor for each of its fused blocks, in order::

        "layers.{}.attention.output": "model.layers.{}.self_attn.o_proj"
        "layers.{}.mlp.gate_up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj")
    """

    model_type: str
    class_name: str
    qkv_bias: bool | None = None
    """Whether this type has biases on query, key and value; None: it stands for models with and without."""
    base: str
    """Prefix of the tensors' names, which is missing where only the base model was saved."""
    weights: Mapping[str, str | tuple[str, ...]]
    transposed: bool = False
    """Products are stored as (in, out)."""
    zero_biases: tuple[str, ...] = ()
    """Our modules whose bias always exists there: zeros where ours has none."""
    names: Mapping[str, str]
    """Their name of each of our fields."""
    defaults: JsonFields
    """By their names: what a missing field means. A field in neither table is required."""
    fixed: JsonFields = field(default_factory=dict)
    """By their names: the only value that our model supports, which is also what a missing field means."""
    supported: Mapping[str, str] = field(default_factory=dict)
    """By their names, for messages: the supported values of fields that may hold something else than one value."""
    extra_fields: Callable[[Values], JsonFields] = _no_fields
    """What else is written into config.json."""
    plain_fields: Callable[[JsonFields], JsonFields] = _as_they_are
    """Their config.json in the one form that `names` and `fixed` describe, where there are several."""
    check: Callable[[Values], Iterable[Problem]] = _no_problems
    """What keeps one of our models of the family from having this form."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of decoders: x + attention(norm(x)), then x + mlp(norm(x)) in every layer, or with norms of what
    attention and MLP give instead of, or beside, those in front of them.

    Parameter counts, FLOPs, the fields of the configuration and their rules, the modules and both directions of the
    conversion follow from this row.
    """

    name: str
    is_default: bool = False
    norm: Norm
    norms_inputs: bool = True
    """Whether a norm is in front of attention and MLP."""
    norms_outputs: bool = False
    """Whether what attention and MLP give is normed before it is added."""
    qk_norm: QkNorm | None = None
    mlp: Mlp
    positions: Positions
    qkv_bias: bool
    """Whether query, key and value projections have biases where model.qkv_bias is null."""
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    own_fields: type[Section] | None = None
    """Fields of `model` that only this family has, with their defaults, types and docstrings."""
    own_defaults: Values = field(default_factory=dict)
    """What null means in own_fields."""
    window_field: str | None = None
    """The field with the number of keys that a query sees, itself included; null there: all before it."""
    local_layers: LocalLayers | None = None
    """None: all layers are alike."""
    score_field: str | None = None
    """The field with the number by whose root scores are divided; null there: by the head size's."""
    score_cap_field: str | None = None
    """The field with c of attention scores c tanh(x / c); null there: they stay x."""
    logit_cap_field: str | None = None
    """The same of the output's logits."""
    scales_embedding: bool = False
    """Whether embedded tokens are multiplied with the root of hidden_size."""
    check: Callable[[Values], Iterable[Problem]] = _no_problems
    """Rules between fields of `model` that only this family has."""
    hf_models: tuple[HfModel, ...] = ()

    @property
    def blocks(self) -> tuple[BlockKind, ...]:
        return self.norm, self.mlp, self.positions, *((self.qk_norm,) if self.qk_norm else ())

    @property
    def num_layer_norms(self) -> int:
        """Norms of (tokens, hidden) in a layer."""
        return 2 * (self.norms_inputs + self.norms_outputs)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of `model` that not every family has."""
        own = tuple(self.own_fields.model_fields) if self.own_fields else ()
        return (*(name for block in self.blocks for name in block.fields), *own)

    @property
    def defaults(self) -> Values:
        """What null means in these fields."""
        found = {name: value for block in self.blocks for name, value in block.defaults.items()}
        return {**found, **self.own_defaults}

    @property
    def description(self) -> str:
        biases = "biases" if self.output_bias else "no biases but on query, key and value" if self.qkv_bias else ""
        some = " in some layers" if self.local_layers else ""
        window = [f"attention within a sliding window{some}"] if self.window_field else []
        places = [place for place, has in (("before", self.norms_inputs), ("after", self.norms_outputs)) if has]
        norms = f"{self.norm.name} {' and '.join(places)} each block"
        parts = [norms, *(block.name for block in self.blocks[1:]), *window, biases or "no biases"]
        return f"{self.name}: {', '.join(parts)}"

    def problems(self, model: Values) -> Iterable[Problem]:
        """The family's broken rules, its blocks' among them."""
        for check in (*(block.check for block in self.blocks), self.check):
            yield from check(model)
