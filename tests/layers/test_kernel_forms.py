"""Layers whose operations are Triton's give what torch's give, recomputed or not, on one rank or several."""

from threading import Lock

import pytest
import torch

from parallel3d.inprocess.world import run_threads
from parallel3d.kernels.launch_kernel import launch_triton
from parallel3d.kernels.layer_kernels import TORCH_KERNELS
from parallel3d.layers.parameter import parameters_of
from parallel3d.parallel.tensor_parallel import TensorParallel, solo_region
from tests.support.kernel_forms import DEVICE
from tests.support.tiny_stages import SEQ, backward_twice, build, micro_batch, model_config, relative, tokens

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
FAMILIES = {"llama": {}, "gpt2": dict(architecture="gpt2", max_position_embeddings=SEQ)}
# fp64: operations in another order. bf16: torch's operators round after each, a kernel once; 8 bits.
TOLERANCE = {"fp64": 1e-11, "fp32": 1e-4, "bf16": 5e-2}
INTERPRETER = Lock()


def one_at_a_time(*args, **options):
    """A launch by one of several threads: the interpreter is not made for more."""
    with INTERPRETER:
        launch_triton(*args, **options)


def tables():
    from parallel3d.kernels.triton_layer_kernels import triton_layer_kernels

    return {"torch": TORCH_KERNELS, "triton": triton_layer_kernels(one_at_a_time)}


def model(family, **changes):
    kv_heads = {} if family == "gpt2" else dict(num_key_value_heads=2)
    return model_config(num_hidden_layers=1, hidden_dropout=0.2, **kv_heads, **FAMILIES[family], **changes)


def gradients(config, form, policy, recompute="none", tp=None, documents=None):
    stage = build(config, tp or solo_region(), policy, recompute, DEVICE, kernels=tables()[form])
    inputs, targets = (ids.to(DEVICE) for ids in tokens(config.vocab_size))
    loss = stage(inputs, micro_batch(documents=documents), targets)
    loss.backward()
    return {p.sharding.name: p.main_grad for p in parameters_of(stage)} | {"loss": loss.detach()}


def assert_near(ours, theirs, policy):
    far = {name: relative(ours[name], theirs[name]) for name in theirs}
    assert {name: distance for name, distance in far.items() if not distance <= TOLERANCE[policy]} == {}


@pytest.mark.parametrize("family, policy, recompute", [("llama", "fp64", "selective"), ("gpt2", "bf16", "full")])
def test_one_rank(family, policy, recompute):
    assert_forms_agree(family, policy, recompute)


@pytest.mark.full
@pytest.mark.each_value(rest=4)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("policy", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_format_and_mode(family, policy, recompute):
    assert_forms_agree(family, policy, recompute)


def assert_forms_agree(family, policy, recompute):
    config = model(family)
    documents = (5, 7, 1, 3, 8) if recompute == "selective" else None
    ours = gradients(config, "triton", policy, recompute, documents=documents)
    assert_near(ours, gradients(config, "torch", policy, documents=documents), policy)


@pytest.mark.full
@pytest.mark.sample(0, rest=2)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_changes_no_bit(family, recompute):
    config = model(family)
    kept, ours = (gradients(config, "triton", "bf16", mode) for mode in ("none", recompute))
    assert [name for name in kept if not torch.equal(kept[name], ours[name])] == []


@pytest.mark.skipif(DEVICE != "cpu", reason="ranks are threads of one process on the CPU")
@pytest.mark.full
@pytest.mark.sample(0, rest=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks(family, sequence_parallel):
    config = model(family)

    def body(rank, world):
        group = world.make_group(rank)("tp", (0, 1))
        tp = TensorParallel(group=group, sequence_parallel=sequence_parallel)
        return [gradients(config, form, "fp64", "selective", tp) for form in ("triton", "torch")]

    for ours, theirs in run_threads(2, body):
        assert_near(ours, theirs, "fp64")


@pytest.mark.full
def test_a_split_backward_pass_is_bitwise_the_whole_one():
    grads = [
        backward_twice(model("llama"), solo_region(), split, "bf16", kernels=tables()["triton"], device=DEVICE)[0]
        for split in (False, True)
    ]
    assert [name for name in grads[0] if not torch.equal(grads[0][name], grads[1][name])] == []
