"""The same function as Hugging Face's models with the same weights: logits, every gradient; and the table of names."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.config.schema import ModelConfig
from parallel3d.errors import ConfigError, UserError
from parallel3d.inprocess.world import run_threads
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models.hf import hf_tensors, load_stage, read_local_shard, write_local_shard
from parallel3d.models.make import make_decoder
from parallel3d.parallel.sharding import UNSHARDED, TpShard
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import POLICIES
from tests.support.hf_models import MODELS, SIZES, their_model
from tests.support.tiers import examples

SEQ, BATCH = 12, 2


@cache
def theirs(name):
    """(logits, gradients of the mean token loss by Hugging Face's names)."""
    model, (inputs, targets) = their_model(name), tokens()
    model.zero_grad()
    logits = model(inputs.view(BATCH, SEQ)).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, targets).backward()
    return logits.detach(), {key: parameter.grad.clone() for key, parameter in model.named_parameters()}


def tokens():
    drawn = torch.randint(SIZES["vocab_size"], (BATCH * SEQ, 2), generator=torch.Generator().manual_seed(5))
    return drawn[:, 0].contiguous(), drawn[:, 1].contiguous()


def run_ours(name, tp_size, sequence_parallel):
    """By rank: the logits, and (sharding, gradient of the mean token loss) of each of its parameters."""
    config, weights = MODELS[name], their_model(name).state_dict()
    batch = MicroBatch(seed=1, iteration=1, slots=(0, 1), sequence_length=SEQ)
    inputs, targets = tokens()

    def body(rank, world):
        group = world.make_group(rank)("tp", tuple(range(tp_size)))
        tp = TensorParallel(group=group, sequence_parallel=sequence_parallel)
        context = LayerContext(tp=tp, policy=POLICIES["fp32"])
        stage = make_decoder(config, range(config.num_hidden_layers), num_positions=SEQ, context=context)
        load_stage(stage, hf_tensors(config), weights.__getitem__, tp=tp.shard)
        logits = stage.logits(inputs, batch)
        stage(inputs, batch, targets).backward()
        return logits, {p.sharding.name: (p.sharding, p.main_grad / len(targets)) for p in parameters_of(stage)}

    return run_threads(tp_size, body)


def gradient_of(tensor, grads):
    """The gradient of one Hugging Face tensor from those of all ranks: parts of it are on one rank or summed."""
    total = torch.zeros(tensor.shape)
    for rank, mine in enumerate(grads):
        sharding, grad = mine[tensor.name]
        if rank == 0 or sharding.dim is not None or sharding.partial_grad:
            part = torch.zeros(tensor.shape)
            write_local_shard(grad, sharding, tensor, part, tp=TpShard(rank=rank, size=len(grads)))
            total += part
    return total


@pytest.mark.each_value
@pytest.mark.parametrize("tp_size, sequence_parallel", [(1, False), (2, True), (4, False)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_all_gradients_are_hugging_faces(name, tp_size, sequence_parallel):
    assert_equal_to_hugging_faces(name, tp_size, sequence_parallel)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_windows_in_blocks_of_queries_are_hugging_faces(name, monkeypatch):
    """The form of large windows, here with 5 keys; the form of small ones is above."""
    monkeypatch.setattr("parallel3d.layers.attention.MIN_BLOCK_WINDOW", 1)
    assert_equal_to_hugging_faces(name, 2, True)


def assert_equal_to_hugging_faces(name, tp_size, sequence_parallel):
    """fp32, 1e-5 of the largest element: its rounding is 6e-8, and sums are taken in other orders. Biases of keys move
    all scores of a query alike and have no gradient but rounding: theirs are held to the model's largest."""
    expected_logits, expected = theirs(name)
    results = run_ours(name, tp_size, sequence_parallel)
    for logits, _ in results:
        assert logits.shape == expected_logits.shape
        assert (logits - expected_logits).abs().max() < 1e-5 * expected_logits.abs().max()
    largest = max(grad.abs().max() for grad in expected.values())
    tensors = [tensor for tensor in hf_tensors(MODELS[name]) if tensor.name is not None]
    assert len(tensors) >= 15
    for tensor in tensors:
        yours, ours = expected[tensor.hf_name], gradient_of(tensor, [grads for _, grads in results])
        scale = largest if tensor.hf_name.endswith("k_proj.bias") else yours.abs().max()
        assert (ours - yours).abs().max() < 1e-5 * scale, tensor.hf_name


@pytest.mark.parametrize("name", MODELS)
def test_the_table_names_every_tensor_of_their_model(name):
    """A tied head is in their state_dict, but is not a tensor of its own."""
    shapes = {key: tuple(value.shape) for key, value in their_model(name).state_dict().items()}
    if MODELS[name].tie_word_embeddings:
        del shapes["lm_head.weight"]
    table = hf_tensors(MODELS[name])
    assert {tensor.hf_name: tensor.shape for tensor in table} == shapes
    assert len(table) == len(shapes)


@st.composite
def layouts(draw):
    """A model, a tensor-parallel size, and the layers of a stage."""
    name, tp_size = draw(st.sampled_from(sorted(MODELS))), draw(st.sampled_from([1, 2, 4]))
    start = draw(st.integers(0, 1))
    return MODELS[name], tp_size, range(start, draw(st.integers(start + 1, 2)))


@settings(max_examples=examples(30))
@given(layouts())
def test_shares_are_parts_of_their_tensors_and_come_together_again(layout):
    """Elements are numbered from 1: zeros are padding."""
    config, tp_size, layers = layout
    held = {sharding.name for sharding in shardings_of(config, layers, tp_size)}
    table = [tensor for tensor in hf_tensors(config) if tensor.name in held]
    whole, count = {}, 1
    for tensor in table:
        num = torch.Size(tensor.shape).numel()
        whole[tensor.hf_name] = torch.arange(count, count + num).view(tensor.shape)
        count += num
    back = {name: torch.zeros_like(value) for name, value in whole.items()}
    names = set()
    for tp in (TpShard(rank=rank, size=tp_size) for rank in range(tp_size)):
        for sharding in shardings_of(config, layers, tp_size):
            share = read_local_shard(sharding, table, whole.__getitem__, tp=tp)
            real = sum(run.length for run in sharding.runs(tp))
            assert (share != 0).sum() == real * (share.numel() // share.shape[sharding.dim or 0])
            for tensor in table:
                if tensor.name == sharding.name:
                    write_local_shard(share, sharding, tensor, back[tensor.hf_name], tp=tp)
            names.add(sharding.name)
    assert names == {tensor.name for tensor in table}
    assert all(torch.equal(back[name], whole[name]) for name in whole)


class Watched:
    """A tensor that counts how much of it is read."""

    def __init__(self, value, counts):
        self.value, self.counts = value, counts
        self.shape, self.dtype = value.shape, value.dtype

    def __getitem__(self, part):
        self.counts.append(self.value[part].numel())
        return self.value[part]


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gpt2-tied"])
def test_a_rank_reads_no_more_than_it_holds(name):
    config = MODELS[name]
    table = hf_tensors(config)
    for sharding in shardings_of(config, range(config.num_hidden_layers), 4):
        counts = []
        whole = {tensor.hf_name: Watched(torch.ones(tensor.shape), counts) for tensor in table}
        share = read_local_shard(sharding, table, whole.__getitem__, tp=TpShard(rank=1, size=4))
        assert sum(counts) == share.sum()  # ones, and zeros for padding


def shardings_of(config, layers, tp_size):
    group = run_threads(tp_size, lambda rank, world: world.make_group(rank)("tp", tuple(range(tp_size))))[0]
    context = LayerContext(tp=TensorParallel(group=group), policy=POLICIES["fp32"], device="meta")
    return [p.sharding for p in parameters_of(make_decoder(config, layers, num_positions=SEQ, context=context))]


def test_what_does_not_fit_is_said():
    config = MODELS["gpt2-gelu-no-qkv-bias"]
    table = hf_tensors(config)
    weights = {tensor.hf_name: torch.zeros(tensor.shape) for tensor in table}
    group = run_threads(1, lambda rank, world: world.make_group(rank)("tp", (0,)))[0]
    context = LayerContext(tp=TensorParallel(group=group), policy=POLICIES["fp32"])
    stage = make_decoder(config, range(2), num_positions=SEQ, context=context)
    load_stage(stage, table, weights.__getitem__, tp=UNSHARDED)
    weights["transformer.h.1.attn.c_attn.bias"][7] = 1.0
    with pytest.raises(UserError, match=r"h\.1\.attn\.c_attn\.bias is not zero, but model\.qkv_bias is false"):
        load_stage(stage, table, weights.__getitem__, tp=UNSHARDED)
    weights["transformer.wpe.weight"] = torch.zeros(17, 32)
    with pytest.raises(UserError, match=r"transformer\.wpe\.weight has the shape \(17, 32\).*asks for \(16, 32\)"):
        load_stage(stage, table, weights.__getitem__, tp=UNSHARDED)
    with pytest.raises(ConfigError, match="one key-value head for each query head"):
        hf_tensors(ModelConfig(**SIZES, architecture="gpt2", num_key_value_heads=2))
