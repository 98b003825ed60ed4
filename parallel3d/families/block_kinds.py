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


@dataclass(frozen=True, kw_only=True)
class Mlp(BlockKind):
    """A feed-forward block."""

    num_matrices: int
    """Weights of hidden_size x intermediate_size."""
    has_bias: bool


@dataclass(frozen=True, kw_only=True)
class Positions(BlockKind):
    """How tokens know where they are."""

    are_learned: bool
    """A parameter (max_position_embeddings, hidden_size); else there are none, and sequences may have any length."""


def _check_even_heads(model: Values) -> Iterable[Problem]:
    size, rest = divmod(model["hidden_size"], model["num_attention_heads"])
    if rest == 0 and size % 2:
        yield Problem(
            field="model.hidden_size",
            value=model["hidden_size"],
            rule=f"makes heads of odd width {size}, and rotary positions turn pairs",
            fix="Change it, or model.num_attention_heads, so that their ratio is even",
        )


RMS_NORM = Norm(name="RMSNorm", num_vectors=1, fields=("rms_norm_eps",), is_compiled=True)
LAYER_NORM = Norm(name="LayerNorm", num_vectors=2, fields=("layer_norm_eps",))
SWIGLU = Mlp(name="SwiGLU", num_matrices=3, has_bias=False, is_compiled=True)
GELU_MLP = Mlp(
    name="an MLP with GELU",
    num_matrices=2,
    has_bias=True,
    fields=("activation_function",),
    defaults={"activation_function": "gelu_new"},
)
ROTARY = Positions(
    name="rotary positions", are_learned=False, fields=("rope_theta",), is_compiled=True, check=_check_even_heads
)
LEARNED = Positions(name="learned positions", are_learned=True)
