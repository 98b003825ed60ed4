"""Recomputed layers give the same gradients, bit for bit, from less memory and with no collective too many."""

from functools import partial

import pytest
import torch
from torch import nn

from parallel3d.config.schema import BatchConfig, Config, OptimizerConfig, ParallelConfig, RunConfig
from parallel3d.errors import GenerationEnded
from parallel3d.inprocess.live_bytes import LiveBytes
from parallel3d.inprocess.world import run_threads
from parallel3d.layers.linear import RowParallelLinear
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.placement import LayerContext
from parallel3d.models.make import make_decoder
from parallel3d.parallel.tensor_parallel import TensorParallel, solo_region
from parallel3d.precision.policy import POLICIES
from parallel3d.recompute import run_layer
from parallel3d.trainer.message_sizes import estimate_message_sizes
from tests.support.tiny_stages import SEQ, backward_twice, build, micro_batch, model_config, solo, tokens

MODES = ("none", "selective", "full")
FAMILIES = {"llama": {}, "gpt2": dict(architecture="gpt2", max_position_embeddings=SEQ)}


def region(world, rank, size, sequence_parallel):
    group = world.make_group(rank)("tp", tuple(range(size)))
    return TensorParallel(group=group, sequence_parallel=sequence_parallel)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("policy", ["fp64", "bf16"])
@pytest.mark.parametrize("size,sequence_parallel", [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_bitwise_the_same(family, size, sequence_parallel, policy, split):
    """Two micro-batches, with dropout; each parameter also gets its gradients as often and as early."""
    config = model_config(hidden_dropout=0.2, num_key_value_heads=4, **FAMILIES[family])

    def body(rank, world):
        tp = region(world, rank, size, sequence_parallel)
        return [backward_twice(config, tp, split, policy, recompute) for recompute in MODES]

    for (kept, counts), *others in run_threads(size, body):
        assert all(grad.any() for grad in kept.values())
        for grads, told in others:
            assert told == counts
            assert [name for name in kept if not torch.equal(grads[name], kept[name])] == []


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_micro_batches_in_flight_do_not_mix(recompute):
    """Two forward passes, then their backward passes, the first one's first and the other way round."""
    config = model_config(hidden_dropout=0.2)
    inputs, targets = tokens(config.vocab_size)
    batches = [micro_batch(slots=(4, 9)), micro_batch(slots=(2, 3))]

    def gradients(mode, order):
        stage = build(config, solo_region(), recompute=mode)
        losses = [stage(inputs, batch, targets) for batch in batches]
        for number in order:
            losses[number].backward()
        return torch.cat([p.main_grad.reshape(-1) for p in stage.parameters()])

    for order in ((0, 1), (1, 0)):
        assert torch.equal(gradients(recompute, order), gradients("none", order))


def test_nothing_is_recorded_without_gradients():
    stage = build(model_config(), solo_region(), recompute="selective")
    inputs, targets = tokens(50)
    with torch.no_grad(), LiveBytes() as memory:
        loss = stage(inputs, micro_batch(training=False), targets)
        assert memory.live == loss.nbytes


# --- collectives ------------------------------------------------------------------------------------------------------


def record_collectives(group, recorded):
    """Records the group's collectives by name."""
    for name in ("all_reduce_async", "reduce_scatter_async", "all_gather_async", "all_reduce_max"):
        setattr(group, name, partial(record_call, recorded, name, getattr(group, name)))


def record_call(recorded, name, post, *tensors):
    recorded.append(name)
    return post(*tensors)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_are_repeated_only_where_they_must(sequence_parallel):
    """Each layer's forward pass: (gather, product, product, sum) twice. Full repeats all but the last sum. On a CPU
    selective gathers twice for the backward pass what none has kept."""
    config = model_config()

    def body(rank, world):
        recorded = {mode: [] for mode in MODES}
        for mode in MODES:
            tp = TensorParallel(group=world.make_group(rank)(mode, (0, 1)), sequence_parallel=sequence_parallel)
            stage = build(config, tp, recompute=mode)
            record_collectives(tp.group, recorded[mode])
            inputs, targets = tokens(config.vocab_size)
            stage(inputs, micro_batch(), targets).backward()
        return recorded

    first, second = run_threads(2, body)
    assert first == second  # in the same order on both ranks
    gathered_again = 2 if sequence_parallel else 0
    assert len(first["selective"]) - len(first["none"]) == gathered_again * config.num_hidden_layers
    repeated = 5 if sequence_parallel else 1
    assert len(first["full"]) - len(first["none"]) == repeated * config.num_hidden_layers


# --- memory -----------------------------------------------------------------------------------------------------------


def numbers_a_token(mode, tp, *, hidden_size=64, intermediate_size=160, seq=32):
    """The fp32 numbers that one layer keeps for each token of the micro-batch: two layers' minus one's."""
    config = model_config(
        hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=4, hidden_dropout=0.0
    )
    kept = []
    for num_layers in (1, 2):
        context = LayerContext(tp=tp, policy=POLICIES["fp32"])
        stage = make_decoder(config, range(1, 1 + num_layers), num_positions=seq, context=context, recompute=mode)
        for p in stage.parameters():
            p.data.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.02)
        x = torch.ones(tp.num_local_tokens(2 * seq), hidden_size).requires_grad_()
        with LiveBytes() as memory:
            output = stage(x, MicroBatch(seed=1, iteration=1, slots=(0, 1), sequence_length=seq))
            tp.group.all_reduce(torch.zeros(()))  # all have what they wait for: threads hand copies to each other
            kept.append(memory.live)
        output.sum().backward()
    return (kept[1] - kept[0]) / 4 / (2 * seq)


def test_saved_memory_is_what_the_formulas_say():
    h, f, heads = 64, 160, 4
    none, selective, full = (numbers_a_token(mode, solo_region()) for mode in MODES)
    assert none == pytest.approx(8 * h + 2 * f + heads + 2, rel=0.01)  # log-sum-exp by head, a scale for each norm
    assert selective == pytest.approx(6 * h + 2 * f + heads, rel=0.01)
    assert full == pytest.approx(h, rel=0.02)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_saved_memory_is_ordered_on_several_ranks(size, sequence_parallel):
    """Under sequence parallelism a rank keeps its share of everything, the sums after the products included."""

    def body(rank, world):
        return [numbers_a_token(mode, region(world, rank, size, sequence_parallel)) for mode in MODES]

    for none, selective, full in run_threads(size, body):
        assert none > 1.15 * selective > 1.15 * 4 * full
        if sequence_parallel:
            assert size * selective == pytest.approx(6 * 64 + 2 * 160 + 4, rel=0.01)
            assert size * full == pytest.approx(64, rel=0.02)


@pytest.mark.parametrize("size,sequence_parallel", [(1, False), (2, False), (2, True)])
def test_the_plan_expects_as_much(size, sequence_parallel):
    """But for log-sum-exps and scales."""

    def body(rank, world):
        return [numbers_a_token(mode, region(world, rank, size, sequence_parallel)) for mode in MODES]

    for mode, measured in zip(MODES, run_threads(size, body)[0]):
        config = Config(
            model=model_config(hidden_size=64, intermediate_size=160),
            parallel=ParallelConfig(tp_size=size, sequence_parallel=sequence_parallel, recompute=mode),
            batch=BatchConfig(micro_batch_size=2, sequence_length=32),
            optimizer=OptimizerConfig(learning_rate=1.0),
            run=RunConfig(num_steps=1),
        )
        sizes = estimate_message_sizes(config, (range(2, 3),))
        assert sizes.stash_bytes[0] / 4 / 64 == pytest.approx(measured, rel=0.02), mode


# --- edges ------------------------------------------------------------------------------------------------------------


class PostNorm(nn.Module):
    """A layer whose backward pass reads the value of its last product."""

    def __init__(self, context):
        super().__init__()
        self.product = RowParallelLinear("product", 8, 8, init_std=0.1, context=context)
        self.norm = RMSNorm("norm.weight", 8, eps=1e-5, context=context)

    def forward(self, x):
        return self.norm(self.product(x, micro_batch()))[1]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_layer_that_needs_its_last_product_shows_it(recompute):
    layer = PostNorm(solo("fp64"))
    for p in layer.parameters():
        p.data.fill_(0.5)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    run_layer(layer, x, recompute=recompute, recompute_context=layer.product.tp.recompute_context).sum().backward()
    assert x.grad is not None and x.grad.isnan().all()


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("call", range(1, 21))
def test_an_end_in_the_middle_leaves_nothing_behind(recompute, call):
    """The generation ends at some collective, forward, recomputed or backward; the next iteration is not affected."""
    config = model_config(hidden_dropout=0.2)
    inputs, targets = tokens(config.vocab_size)

    def body(rank, world):
        tp = region(world, rank, 2, True)
        stage = build(config, tp, recompute=recompute)
        end_at(tp.group, call)
        with pytest.raises(GenerationEnded):
            stage(inputs, micro_batch(), targets).backward()
        tp.group = world.make_group(rank)("next", (0, 1))
        grads = []
        for each in (stage, build(config, tp)):
            for p in each.parameters():
                p.sink.buffer.zero_()
            each(inputs, micro_batch(), targets).backward()
            grads.append(torch.cat([p.main_grad.reshape(-1) for p in each.parameters()]))
        return torch.equal(*grads)

    assert run_threads(2, body) == [True, True]


def end_at(group, call):
    """The group's `call`-th collective raises, on all ranks alike."""
    left = [call]

    def count(post, *tensors):
        left[0] -= 1
        if left[0] == 0:
            raise GenerationEnded("a peer was lost")
        return post(*tensors)

    for name in ("all_reduce_async", "reduce_scatter_async", "all_gather_async"):
        setattr(group, name, partial(count, getattr(group, name)))
