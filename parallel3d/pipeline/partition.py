"""Splits the layers over the stages: contiguous ranges such that the costliest stage costs as little as possible.

A pipeline is as fast as its slowest stage. With equal layers, free ends and a depth that divides, the cuts fall after
layers k * L / P - 1 (HLAT, section 2.2); a costly head makes the last stage shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd

from parallel3d.errors import ConfigError, Problem

COST_UNITS = 6
"""Time units of the costliest pass of a stage: few, so that passes of nearly equal length become equal. A replica then
does not start work in a gap that no clock would show. 6 and 24 were within 1 % of each other."""


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Forward cost of one token in each part of the model, in floating-point operations."""

    embedding: int
    layer: int
    attention: int
    """The part of a layer without weights: its backward pass has no weight gradients, but costs twice the forward."""
    head: int
    last_matmul: int = 0
    """The part of a layer that is not repeated where layers are recomputed."""


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Time units that each stage takes for one micro-batch; a backward that is not split costs both halves."""

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = {len(self.forward), len(self.backward_input), len(self.backward_weight)}
        assert len(counts) == 1, f"costs of different numbers of stages: {self}"
        assert min((*self.forward, *self.backward_input, *self.backward_weight), default=1) >= 1, f"below 1: {self}"

    @staticmethod
    def equal(num_stages: int) -> StageCosts:
        """Equal costs, as in the papers: of all stages, and of a forward and both halves of a backward."""
        return StageCosts(
            forward=(1,) * num_stages, backward_input=(1,) * num_stages, backward_weight=(1,) * num_stages
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def backward(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.backward_input, self.backward_weight)))

    @property
    def total(self) -> tuple[int, ...]:
        """Forward and backward."""
        return tuple(map(sum, zip(self.forward, self.backward)))


def model_costs(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    vocab_size: int,
    sequence_length: int,
    num_mlp_matrices: int = 3,
    head_size: int | None = None,
) -> ModelCosts:
    """Costs of a decoder: 2 operations per weight of each matrix product, and the attention itself.

    `num_mlp_matrices` of hidden_size x intermediate_size: gate, up and down, or two of them without a gate. `head_size`
    None: hidden_size divided by the heads.

    The embedding is a look-up. Attention scores and their product with the values count 4 * sequence_length *
    the width of all queries: not halved for the causal mask, as in PaLM's and Megatron-LM's formulas.
    """
    head_size = head_size or hidden_size // num_attention_heads
    query_size, key_value_size = num_attention_heads * head_size, num_key_value_heads * head_size
    attention_weights = hidden_size * (2 * query_size + 2 * key_value_size)
    mlp_weights = num_mlp_matrices * hidden_size * intermediate_size
    return ModelCosts(
        embedding=0,
        layer=2 * (attention_weights + mlp_weights) + 4 * sequence_length * query_size,
        attention=4 * sequence_length * query_size,
        head=2 * hidden_size * vocab_size,
        last_matmul=2 * hidden_size * intermediate_size,
    )


def partition_layers(
    layer_costs: Sequence[int], num_stages: int, embedding_cost: int = 0, head_cost: int = 0
) -> tuple[range, ...]:
    """The layers of each stage, at least one: the least possible largest stage cost.

    The first stage carries embedding_cost, the last one head_cost. Among equally good cuts the one with the most even
    numbers of layers is taken, then the one with fewer layers on earlier stages: they hold more micro-batches.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigError([_too_many_stages(num_stages, num_layers)])
    costs = _PartitionCosts(layer_costs, num_stages, embedding_cost, head_cost)
    counts = _most_even_counts(costs, _least_bottleneck(costs))
    return _ranges(counts)


def partition_from_counts(layers_per_stage: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, from the numbers that the user gave."""
    if not layers_per_stage or min(layers_per_stage) < 1:
        rule, fix = "every stage holds at least one layer", "Give counts of at least 1."
        field = "parallel.layers_per_stage"
        raise ConfigError([Problem(field=field, value=list(layers_per_stage), rule=rule, fix=fix)])
    return _ranges(layers_per_stage)


def stage_costs(
    partition: Sequence[range], layer_costs: Sequence[int], embedding_cost: int = 0, head_cost: int = 0
) -> tuple[int, ...]:
    """The cost of each stage of a partition."""
    costs = [sum(layer_costs[layer] for layer in layers) for layers in partition]
    costs[0] += embedding_cost
    costs[-1] += head_cost
    return tuple(costs)


def pass_costs(partition: Sequence[range], costs: ModelCosts, *, recomputes: bool = False) -> StageCosts:
    """The cost of each stage's passes in small integers, the planner's unit of time.

    The head computes its gradients in the forward pass, so that all three products of it count there. A layer's
    backward costs its products once for the inputs and once for the weights, its attention twice for the inputs.
    A recomputed layer repeats all but its last product before
    the gradients of its inputs.
    """
    recomputed = costs.layer - costs.last_matmul if recomputes else 0
    num_layers = [len(layers) for layers in partition]
    heads = [0] * (len(partition) - 1) + [costs.head]
    embeddings = [costs.embedding] + [0] * (len(partition) - 1)
    forward = [n * costs.layer + e + 3 * h for n, e, h in zip(num_layers, embeddings, heads)]
    backward_input = [n * (costs.layer + costs.attention + recomputed) + e for n, e in zip(num_layers, embeddings)]
    backward_weight = [n * (costs.layer - costs.attention) for n in num_layers]
    return _in_small_units(forward, backward_input, backward_weight)


def _in_small_units(*passes: Sequence[int]) -> StageCosts:
    """At most COST_UNITS, at least 1, without a common divisor."""
    most = max(map(max, passes))
    scaled = [[max(1, (2 * COST_UNITS * cost + most) // (2 * most)) for cost in costs] for costs in passes]
    divisor = gcd(*(cost for costs in scaled for cost in costs))
    forward, backward_input, backward_weight = (tuple(cost // divisor for cost in costs) for costs in scaled)
    return StageCosts(forward=forward, backward_input=backward_input, backward_weight=backward_weight)


def _too_many_stages(num_stages: int, num_layers: int) -> Problem:
    rule = f"a pipeline of {num_layers} layers has 1 to {num_layers} stages"
    return Problem(field="parallel.pp_size", value=num_stages, rule=rule, fix="Use fewer stages or a deeper model.")


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))


class _PartitionCosts:
    """Cost of layers begin..end-1 when they are the given stage."""

    def __init__(self, layer_costs: Sequence[int], num_stages: int, embedding_cost: int, head_cost: int):
        self.num_layers, self.num_stages = len(layer_costs), num_stages
        self.before = list(accumulate(layer_costs, initial=0))
        self.extra = [0] * num_stages
        self.extra[0] += embedding_cost
        self.extra[-1] += head_cost

    def of(self, stage: int, begin: int, end: int) -> int:
        return self.before[end] - self.before[begin] + self.extra[stage]

    def ends(self, stage: int, begin: int) -> range:
        """The possible ends of a stage that begins here: each later stage keeps a layer, the last stage takes all."""
        left = self.num_stages - 1 - stage
        return range(begin + 1, self.num_layers - left + 1) if left else range(self.num_layers, self.num_layers + 1)

    def begins(self, stage: int) -> range:
        return range(stage, self.num_layers - (self.num_stages - 1 - stage)) if stage else range(1)


def _least_bottleneck(costs: _PartitionCosts) -> int:
    """Dynamic programme from the last stage back: best[begin] = least largest cost of this and all later stages."""
    best = {costs.num_layers: 0}
    for stage in reversed(range(costs.num_stages)):
        best = {
            begin: min(max(costs.of(stage, begin, end), best[end]) for end in costs.ends(stage, begin))
            for begin in costs.begins(stage)
        }
    return best[0]


def _most_even_counts(costs: _PartitionCosts, bottleneck: int) -> tuple[int, ...]:
    """The split with no stage above the bottleneck and the least sum of squared counts, then small counts first."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {costs.num_layers: (0, ())}
    for stage in reversed(range(costs.num_stages)):
        now: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin in costs.begins(stage):
            options = [
                ((end - begin) ** 2 + best[end][0], (end - begin, *best[end][1]))
                for end in costs.ends(stage, begin)
                if end in best and costs.of(stage, begin, end) <= bottleneck
            ]
            if options:
                now[begin] = min(options)
        best = now
    return best[0][1]
