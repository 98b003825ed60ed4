"""The kinds of blocks that a decoder is made of: what each adds to the parameters, and the fields that it reads.

`parallel3d/models/blocks.py` builds them. A family picks one norm, one MLP and one kind of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel3d.errors import Problem

Values = Mapping[str, Any]
"""The fields of the section `model`, by name."""


def _no_problems(model: Values) -> Iterable[Problem]:
    return ()


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """A kind of block."""

    name: str
    fields: tuple[str, ...] = ()
    """The fields of `model` that only families with this block have."""
    defaults: Values = field(default_factory=dict)
    """What null means in these fields."""
    is_compiled: bool = False
    """run.compile makes one kernel of its elementwise chain."""
    check: Callable[[Values], Iterable[Problem]] = _no_problems


@dataclass(frozen=True, kw_only=True)
class Norm(BlockKind):
    """A norm of (tokens, hidden)."""

    num_vectors: int
    """Parameters of hidden_size elements: a weight, and perhaps a bias."""
    offset: float = 0.0
    """Added to the weight, which begins at zero then; to those of norms of heads, too."""


@dataclass(frozen=True, kw_only=True)
class QkNorm(BlockKind):
    """A norm of queries and keys, in front of the rotation."""

    is_of_heads: bool
    """Each head by itself, with one weight for all query heads and one for all key heads; else all of a token's queries
    together, and all of its keys."""

    def num_weights(self, *, query_size: int, key_value_size: int, head_size: int) -> int:
        """Of one layer."""
        return 2 * head_size if self.is_of_heads else query_size + key_value_size


@dataclass(frozen=True, kw_only=True)
class Mlp(BlockKind):
    """A feed-forward block."""

    num_matrices: int
    """Weights of hidden_size x intermediate_size."""
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Positions(BlockKind):
    """How tokens know where they are."""

    are_learned: bool
    """A parameter (max_position_embeddings, hidden_size); else there are none, and sequences may have any length."""


ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("rope_factor",),
    "llama3": ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_positions"),
}
"""Scalings of rotary frequencies by `model.rope_type`, with the fields that each needs."""
_ROPE_FIELDS = ROPE_TYPES["llama3"]


def _check_rotary(model: Values) -> Iterable[Problem]:
    heads, hidden_size = model["num_attention_heads"], model["hidden_size"]
    size, rest = (model["head_dim"], 0) if model["head_dim"] else divmod(hidden_size, heads)
    if rest == 0 and size % 2:
        yield Problem(
            field="model.head_dim" if model["head_dim"] else "model.hidden_size",
            value=model["head_dim"] or hidden_size,
            rule=f"makes heads of odd width {size}, and rotary positions turn pairs",
            fix="Change it, or model.num_attention_heads, so that heads have an even width",
        )
    kind, low, high = (model[name] for name in ("rope_type", "rope_low_freq_factor", "rope_high_freq_factor"))
    for name in _ROPE_FIELDS:
        if name in ROPE_TYPES[kind] and model[name] is None:
            rule = f"is required by model.rope_type {kind}"
            yield Problem(field=f"model.{name}", value=None, rule=rule, fix="Set it")
        elif name not in ROPE_TYPES[kind] and model[name] is not None:
            owners = " or ".join(other for other, fields in ROPE_TYPES.items() if name in fields)
            rule = f"only applies to model.rope_type {owners}, and it is {kind}"
            yield Problem(field=f"model.{name}", value=model[name], rule=rule, fix="Remove it, or set the type")
    if kind == "llama3" and low is not None and high is not None and low >= high:
        rule = f"must be above model.rope_low_freq_factor ({low:g})"
        yield Problem(field="model.rope_high_freq_factor", value=high, rule=rule, fix="Raise it")


RMS_NORM = Norm(name="RMSNorm", num_vectors=1, fields=("rms_norm_eps",), is_compiled=True)
OFFSET_RMS_NORM = Norm(
    name="RMSNorm with 1 + its weights", num_vectors=1, offset=1.0, fields=RMS_NORM.fields, is_compiled=True
)
HEAD_NORM = QkNorm(name="RMSNorm of each query and key head", is_of_heads=True)
PROJECTION_NORM = QkNorm(name="RMSNorm of all queries and of all keys", is_of_heads=False)
LAYER_NORM = Norm(name="LayerNorm", num_vectors=2, fields=("layer_norm_eps",))
SWIGLU = Mlp(name="SwiGLU", num_matrices=3, has_bias=False, is_compiled=True)
GEGLU = Mlp(name="GeGLU", num_matrices=3)
GELU_MLP = Mlp(
    name="an MLP with GELU",
    num_matrices=2,
    has_bias=True,
    fields=("activation_function",),
    defaults={"activation_function": "gelu_new"},
)
ROTARY = Positions(
    name="rotary positions",
    are_learned=False,
    fields=("rope_theta", "rope_type", *_ROPE_FIELDS),
    is_compiled=True,
    check=_check_rotary,
)
LEARNED = Positions(name="learned positions", are_learned=True)
