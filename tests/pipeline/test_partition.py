"""Cuts: even where they can be, and never worse than the best of all cuts."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.derived import flops_per_token
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import ConfigError
from parallel3d.pipeline.partition import (
    COST_UNITS,
    ModelCosts,
    StageCosts,
    model_costs,
    partition_from_counts,
    partition_layers,
    pass_costs,
    stage_costs,
)


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 100))
def test_equal_layers_are_cut_evenly(num_stages, layers_each, cost):
    partition = partition_layers([cost] * (num_stages * layers_each), num_stages)
    assert [layers.stop - 1 for layers in partition] == [k * layers_each - 1 for k in range(1, num_stages + 1)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 20), st.integers(0, 20))
def test_no_cut_is_better(layer_costs, num_stages, embedding_cost, head_cost):
    num_layers = len(layer_costs)
    num_stages = min(num_stages, num_layers)
    partition = partition_layers(layer_costs, num_stages, embedding_cost, head_cost)
    assert [layer for layers in partition for layer in layers] == list(range(num_layers))
    assert len(partition) == num_stages and all(partition)

    def judge(cut):
        counts = tuple(map(len, cut))
        return max(stage_costs(cut, layer_costs, embedding_cost, head_cost)), sum(n * n for n in counts), counts

    ends = combinations(range(1, num_layers), num_stages - 1)
    every_cut = [tuple(range(*cut) for cut in pairwise((0, *end, num_layers))) for end in ends]
    assert judge(partition) == min(map(judge, every_cut))


def test_a_costly_head_shortens_the_last_stage():
    assert list(map(len, partition_layers([10] * 16, 4, 0, 20))) == [4, 4, 5, 3]
    assert stage_costs(partition_layers([10] * 16, 4, 0, 20), [10] * 16, 0, 20) == (40, 40, 50, 50)


def test_partition_by_hand():
    assert partition_from_counts([1, 3, 2]) == (range(0, 1), range(1, 4), range(4, 6))


@pytest.mark.parametrize("counts", [[], [2, 0]])
def test_a_stage_by_hand_holds_a_layer(counts):
    with pytest.raises(ConfigError, match="at least one layer"):
        partition_from_counts(counts)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_every_stage_holds_a_layer(num_stages):
    with pytest.raises(ConfigError, match="a pipeline of 3 layers has 1 to 3 stages"):
        partition_layers([1, 1, 1], num_stages)


def test_costs_are_a_third_of_the_flops_of_training():
    sizes = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    costs = model_costs(**sizes, sequence_length=4096)
    model = ModelConfig(**sizes, num_hidden_layers=80)
    assert 3 * (costs.embedding + 80 * costs.layer + costs.head) == flops_per_token(model, 4096)
    assert costs.head == 2 * 8192 * 32000
    costs = model_costs(**sizes, sequence_length=4096, num_mlp_matrices=2)
    model = ModelConfig(**sizes, num_hidden_layers=80, architecture="gpt2")
    assert 3 * (costs.embedding + 80 * costs.layer + costs.head) == flops_per_token(model, 4096)


def test_equal_stages_without_attention_cost_what_the_textbook_says():
    costs = ModelCosts(embedding=0, layer=1000, attention=0, head=0)
    assert pass_costs((range(0, 4), range(4, 8)), costs) == StageCosts.equal(2)


def test_the_schedule_weighs_head_and_attention():
    """The head's three products all come with the forward pass; attention has no weights, but two gradients."""
    costs = ModelCosts(embedding=0, layer=10, attention=2, head=5)
    scheduled = pass_costs((range(0, 3), range(3, 5)), costs)  # forward 30, 35; input 36, 24; weight 24, 16
    assert scheduled == StageCosts(forward=(5, 6), backward_input=(6, 4), backward_weight=(4, 3))
    assert scheduled.backward == (10, 7) and scheduled.total == (15, 13)


def test_the_schedule_weighs_recomputed_layers():
    """All but the last product of each layer, before the gradients of its input."""
    costs = ModelCosts(embedding=0, layer=6, attention=0, head=0, last_matmul=3)
    scheduled = pass_costs((range(0, 3), range(3, 6)), costs, recomputes=True)
    assert scheduled == StageCosts(forward=(2, 2), backward_input=(3, 3), backward_weight=(2, 2))


@given(st.integers(1, 10**12), st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 8))
def test_schedule_costs_are_small_and_near(layer, attention, head, num_stages):
    costs = ModelCosts(embedding=0, layer=layer, attention=min(attention, layer), head=head)
    partition = tuple(range(2 * stage, 2 * stage + 2) for stage in range(num_stages))
    scheduled = pass_costs(partition, costs)
    whole = 2 * layer + 3 * head  # the forward of the last stage
    most = max(whole, 2 * (layer + costs.attention))
    units = max(*scheduled.forward, *scheduled.backward_input, *scheduled.backward_weight)
    assert 1 <= min(*scheduled.forward, *scheduled.backward_input, *scheduled.backward_weight) <= units <= COST_UNITS
    assert abs(scheduled.forward[-1] / units - whole / most) <= 1 / COST_UNITS
