"""A CUDA device gives what a CPU gives: the layers of families that differ in their blocks, recomputed or not."""

import pytest
import torch

from parallel3d.layers.parameter import parameters_of
from parallel3d.parallel.tensor_parallel import solo_region
from tests.support.kernel_forms import DEVICE
from tests.support.tiny_stages import SEQ, build, micro_batch, model_config, relative, tokens

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.full  # without one, the CPU stands in
FAMILIES = {
    "llama": {},
    "gpt2": dict(architecture="gpt2", max_position_embeddings=SEQ),
    "qwen3": dict(architecture="qwen3", head_dim=16),
    "olmo2": dict(architecture="olmo2"),
    "gemma2": dict(
        architecture="gemma2", sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, head_dim=16
    ),
    "gemma3": dict(architecture="gemma3", sliding_window=5, sliding_window_pattern=2, head_dim=16),
}
# fp64: sums in another order. fp32 and bf16: 24 and 8 bits, and attention kernels that add in another order.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 5e-2}


def gradients(config, policy, recompute, device, documents=None):
    stage = build(config, solo_region(), policy, recompute, device)
    inputs, targets = (ids.to(device) for ids in tokens(config.vocab_size))
    loss = stage(inputs, micro_batch(documents=documents), targets)
    loss.backward()
    return loss.item(), {p.sharding.name: p.main_grad.cpu() for p in parameters_of(stage)}


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("policy", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family, policy, recompute):
    config = model_config(hidden_dropout=0.2, num_key_value_heads=2, **FAMILIES[family])
    loss, expected = gradients(config, policy, "none", "cpu")
    device_loss, grads = gradients(config, policy, recompute, DEVICE)
    assert device_loss == pytest.approx(loss, rel=TOLERANCE[policy])
    assert {name: grad for name, grad in grads.items() if relative(grad, expected[name]) > TOLERANCE[policy]} == {}


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("policy", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_apart(family, policy, recompute):
    """In bf16 by torch's kernel for sequences of many lengths, else one by one."""
    config, documents = model_config(num_key_value_heads=2, **FAMILIES[family]), (5, 7, 1, 3, 8)
    loss, expected = gradients(config, policy, "none", "cpu", documents)
    device_loss, grads = gradients(config, policy, recompute, DEVICE, documents)
    assert device_loss == pytest.approx(loss, rel=TOLERANCE[policy])
    assert {name: grad for name, grad in grads.items() if relative(grad, expected[name]) > TOLERANCE[policy]} == {}


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(recompute):
    """Nor in the embedding, whose rows are added up without atomic operations: each of three tokens occurs often, since
    two rows have one sum in either order."""
    config = model_config(hidden_dropout=0.2, vocab_size=3)
    kept, grads = (gradients(config, "fp32", mode, DEVICE)[1] for mode in ("none", recompute))
    assert [name for name in kept if not torch.equal(kept[name], grads[name])] == []
