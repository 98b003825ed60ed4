"""The configuration's section `model`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveFloat, PositiveInt, create_model

from parallel3d.config.rule import multiple_rule, must_be_multiple, rule
from parallel3d.config.sections.section import Fraction, Section
from parallel3d.errors import Problem
from parallel3d.families import DEFAULT_FAMILY, FAMILIES

if TYPE_CHECKING:
    Architecture = str
else:
    Architecture = Literal[tuple(FAMILIES)]


class DecoderConfig(Section):
    """The decoder's shape. Fields have the names of Hugging Face configurations."""

    architecture: Architecture = Field(
        default=DEFAULT_FAMILY,
        description=f"Family of the model. {'. '.join(family.description for family in FAMILIES.values())}."
        " All support grouped-query attention.",
    )
    module: str | None = None
    """A function of yours that makes the model's layers, "package:function" or "path/to/file.py:function"
    (docs/python.md); the fields of this section reach it, and decide what it leaves to us: embedding, final norm and
    head. Null: the layers of `architecture`."""
    vocab_size: PositiveInt
    """Rows of the embedding and of the output head, padded if parallel.tp_size does not divide it. At least
    data.tokenizer.vocab_size."""
    hidden_size: PositiveInt
    """Width of the residual stream. A multiple of num_attention_heads, unless head_dim is given."""
    intermediate_size: PositiveInt
    """Inner width of the MLP; a multiple of parallel.tp_size."""
    num_hidden_layers: PositiveInt
    """Number of decoder layers; at least parallel.pp_size."""
    num_attention_heads: PositiveInt
    """Query heads; a multiple of parallel.tp_size and of num_key_value_heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; even for rotary positions. All heads together may be wider or narrower than hidden_size. Null:
    hidden_size divided by num_attention_heads."""
    num_key_value_heads: PositiveInt | None = None
    """Key and value heads, each shared by a group of query heads; a multiple of parallel.tp_size, or a divisor: then
    several ranks hold copies of a head. Null: one per query head."""
    tie_word_embeddings: bool = False
    """The output head uses the embedding's matrix: one parameter, held by the first and the last pipeline stage."""
    qkv_bias: bool | None = None
    """Biases on the query, key and value projections. Null: where the family has them."""
    max_position_embeddings: PositiveInt | None = None
    """The longest sequence, and the number of learned positions. Null: batch.sequence_length."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square inside RMSNorm."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_type: Literal["default", "linear", "llama3"] = "default"
    """How a model reaches beyond the positions of its first training. linear: all rotary frequencies are divided by
    rope_factor (Chen et al. 2023). llama3: those of long waves are (Llama 3.1), short ones stay, and those between
    change over smoothly."""
    rope_factor: PositiveFloat | None = None
    """Divisor of rotary frequencies; required by rope_type linear and llama3."""
    rope_low_freq_factor: PositiveFloat | None = None
    """For rope_type llama3, which requires it: waves longer than rope_original_positions / this are divided."""
    rope_high_freq_factor: PositiveFloat | None = None
    """For rope_type llama3, which requires it: waves shorter than rope_original_positions / this stay. Above
    rope_low_freq_factor."""
    rope_original_positions: PositiveInt | None = None
    """For rope_type llama3, which requires it: the longest sequence of the first training."""
    layer_norm_eps: PositiveFloat = 1e-5
    """Added to the variance inside LayerNorm."""
    norm_backend: Literal["torch", "apex", "auto"] = "torch"
    """Implementation of the norms: ours in torch, or NVIDIA apex's fused kernels (CUDA; not run yet). auto: apex if it
    is installed."""
    activation_function: Literal["gelu_new", "gelu"] | None = None
    """The MLP's GELU: the approximation with tanh (gelu_new) or the exact function (gelu). Null: gelu_new."""
    hidden_dropout: Fraction = 0.0
    """Probability of dropping an element after the embedding, the attention output and the MLP output."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    initializer_depth_scaling: Literal["none", "layer_index", "num_layers"] = "none"
    """Scales the initial output projections of attention and MLP. layer_index: by 1/sqrt(2 l), l the 1-based layer
    index (HLAT's paper). num_layers: by 1/sqrt(2 L) in every layer (HLAT's code)."""


if TYPE_CHECKING:
    ModelConfig = DecoderConfig
else:
    _FOUND = dict.fromkeys(family.own_fields for family in FAMILIES.values() if family.own_fields)
    _OWN_FIELDS = tuple(own for own in _FOUND if not any(own in other.__mro__[1:] for other in _FOUND))
    ModelConfig = create_model(
        "ModelConfig", __base__=(*_OWN_FIELDS, DecoderConfig), __doc__=DecoderConfig.__doc__, __module__=__name__
    )
    """The section `model`: the fields that all families share, then each family's own."""


FAMILY_FIELDS = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.fields))
"""The fields of `model` that not every family has."""

groups_divide_heads = multiple_rule(
    "model.num_attention_heads", "model.num_key_value_heads", "key-value heads serve equally many query heads"
)
ranks_divide_heads = multiple_rule(
    "model.num_attention_heads", "parallel.tp_size", "a tensor-parallel rank holds whole heads"
)
ranks_divide_mlp = multiple_rule(
    "model.intermediate_size", "parallel.tp_size", "tensor-parallel ranks hold equal shares"
)


@rule("model.hidden_size", "model.num_attention_heads", "model.head_dim")
def check_head_width(hidden_size: int, num_heads: int, head_dim: int | None) -> Iterator[Problem]:
    """All heads have one width."""
    if head_dim is None:
        why = "all heads have one width, if model.head_dim gives none"
        yield from must_be_multiple("model.hidden_size", hidden_size, "model.num_attention_heads", num_heads, why)


@rule("model")
def check_family(model: ModelConfig) -> Iterator[Problem]:
    """The family's own rules."""
    yield from FAMILIES[model.architecture].problems(model.model_dump())


@rule(f"model: architecture {' '.join(FAMILY_FIELDS)}")
def check_other_families(model: ModelConfig) -> Iterator[Problem]:
    """No field is set that belongs to other families; a field at its default is not set."""
    own = FAMILIES[model.architecture].fields
    for name in FAMILY_FIELDS:
        value = getattr(model, name)
        if name not in own and value != ModelConfig.model_fields[name].default:
            owners = " or ".join(family.name for family in FAMILIES.values() if name in family.fields)
            yield Problem(
                field=f"model.{name}",
                value=value,
                rule=f"only applies to {owners}, and model.architecture is {model.architecture}",
                fix=f"Remove it, or use model.architecture {owners}",
            )


@rule("model.num_key_value_heads", "parallel.tp_size")
def check_key_value_heads(heads: int | None, tp_size: int) -> Iterator[Problem]:
    """A tensor-parallel rank holds whole key-value heads, or a copy of one."""
    if heads is not None and heads % tp_size and tp_size % heads:
        yield Problem(
            field="model.num_key_value_heads",
            value=heads,
            rule=f"must be a multiple or a divisor of parallel.tp_size ({tp_size}): a tensor-parallel rank holds whole"
            " heads, or a copy of one",
            fix="Change one of the two",
        )


@rule("model.module", "model.hidden_dropout", "parallel.sequence_parallel")
def check_module(module: str | None, hidden_dropout: float, sequence_parallel: bool) -> Iterator[Problem]:
    """A user's own layers see whole sequences, and drop by modules of their own."""
    if module is None:
        return
    if ":" not in module:
        fix = "Name package:function, or path/to/file.py:function"
        yield Problem(field="model.module", value=module, rule="names no function", fix=fix)
    rules = [
        ("model.hidden_dropout", hidden_dropout, 0.0, "they drop where they have a torch.nn.Dropout"),
        ("parallel.sequence_parallel", sequence_parallel, False, "they see whole sequences"),
    ]
    for field, value, allowed, why in rules:
        if value != allowed:
            rule_text = f"does not apply to the layers of model.module: {why}"
            yield Problem(field=field, value=value, rule=rule_text, fix=f"Set it to {allowed!r}")
