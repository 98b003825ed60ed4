"""One matrix as embedding and head: one parameter on a stage that is both ends, two of one name elsewhere."""

from collections import Counter
from functools import partial

import torch

from parallel3d.config.derived import num_parameters
from parallel3d.config.schema import ModelConfig
from parallel3d.layers.gradient_sink import GradientSink
from parallel3d.layers.init import initial_value
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models.make import make_decoder
from parallel3d.parallel.sharding import UNSHARDED
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.precision.policy import POLICIES
from tests.support.plain_llama import plain_loss

NAME = "embedding.weight"
BATCH, SEQ = 2, 6
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    initializer_range=0.2,
    tie_word_embeddings=True,
)
MICRO_BATCH = MicroBatch(seed=7, iteration=3, slots=(4, 9), sequence_length=SEQ)


def build(*layers: range):
    """A stage for each range of layers, with the initial weights."""
    context = LayerContext(tp=solo_region(), policy=POLICIES["fp64"])
    stages = [make_decoder(CONFIG, mine, num_positions=SEQ, context=context) for mine in layers]
    for stage in stages:
        for p in parameters_of(stage):
            p.data.copy_(initial_value(p.sharding, seed=7, tp=UNSHARDED))
    return stages


def tokens():
    drawn = torch.randint(CONFIG.vocab_size, (BATCH * SEQ, 2), generator=torch.Generator().manual_seed(5))
    return drawn[:, 0].contiguous(), drawn[:, 1].contiguous()


def tied_parameters(stage):
    return [p for p in parameters_of(stage) if p.sharding.tied]


def test_one_stage_has_one_parameter_and_its_gradient_is_that_of_plain_torch():
    (stage,) = build(range(2))
    assert stage.head.weight is stage.embedding.weight and tied_parameters(stage) == [stage.head.weight]
    assert sum(p.numel() for p in parameters_of(stage)) == num_parameters(CONFIG)
    counts = Counter()
    for p in parameters_of(stage):
        p.attach(GradientSink.with_own_buffer(p, on_added=partial(counts.update, [p.sharding.name])))
    weights = {p.sharding.name: p.detach().clone().requires_grad_() for p in parameters_of(stage)}
    inputs, targets = tokens()
    stage(inputs, MICRO_BATCH, targets).backward()
    plain_loss(CONFIG, weights, inputs.view(BATCH, SEQ), targets.view(BATCH, SEQ)).backward()
    for p in parameters_of(stage):
        assert counts[p.sharding.name] == (2 if p.sharding.tied else 1)  # head and embedding, each its part
        assert (p.main_grad - weights[p.sharding.name].grad).abs().max() < 1e-12 * p.main_grad.abs().max()


def test_two_stages_have_the_same_parameter_and_each_a_part_of_its_gradient():
    (whole,) = build(range(2))
    first, last = build(range(1), range(1, 2))
    (ours,), (theirs,), (reference,) = map(tied_parameters, (first, last, whole))
    assert ours.sharding == theirs.sharding == reference.sharding and ours.sharding.name == NAME
    assert torch.equal(ours, theirs) and torch.equal(ours, reference)
    inputs, targets = tokens()
    whole(inputs, MICRO_BATCH, targets).backward()
    hidden = first(inputs, MICRO_BATCH)
    last(hidden, MICRO_BATCH, targets).backward()
    assert ours.main_grad.any() and theirs.main_grad.any()
    difference = (ours.main_grad + theirs.main_grad - reference.main_grad).abs().max()
    assert difference < 1e-14 * reference.main_grad.abs().max()  # two sums of the same terms


def test_untied_ends_are_parameters_of_their_own():
    context = LayerContext(tp=solo_region(), policy=POLICIES["fp64"])
    config = CONFIG.model_copy(update={"tie_word_embeddings": False})
    stage = make_decoder(config, range(2), num_positions=SEQ, context=context)
    assert not tied_parameters(stage) and stage.head.weight.sharding.name == "head.weight"
