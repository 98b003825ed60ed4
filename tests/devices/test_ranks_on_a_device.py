"""A rank on a CUDA device, with its real buckets, against the same rank on a CPU: gradients, update, whole steps."""

import pytest
import torch

from benchmarks.device.our_steps import build_rank
from parallel3d.config.load import resolve
from parallel3d.config.schema import Config
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.optim.update_rules.update_rule import UpdateStep
from parallel3d.trainer.step import train_step
from tests.support.kernel_forms import DEVICE as DEVICE_TYPE

pytestmark = pytest.mark.gpu if DEVICE_TYPE == "cuda" else pytest.mark.full  # without one, the CPU stands in
DEVICE = torch.device(DEVICE_TYPE, 0)
CPU = torch.device("cpu")
SEQ, VOCAB = 32, 57  # 57 is a multiple of nothing, so that rows of logits begin at unaligned addresses
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "gpt2": {"architecture": "gpt2", "max_position_embeddings": SEQ, "tie_word_embeddings": True},
}
# main gradients in bf16 (8 bits) are rounded after each micro-batch; fp32: sums in another order
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "bf16_sr": 5e-2}


def config(policy, family="llama", recompute="none", **sections):
    sizes = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    fields = {
        "model": {**sizes, "initializer_range": 0.1, **FAMILIES[family]},
        "parallel": {"dp_size": 1, "recompute": recompute, "bucket_mib": 0.02},
        "batch": {"global_batch_size": 8, "micro_batch_size": 4, "sequence_length": SEQ},
        "precision": {"policy": policy},
        "optimizer": {"learning_rate": 1e-2},
        "run": {"num_steps": 4},
    }
    for name, section in sections.items():
        fields[name] = {**fields.get(name, {}), **section}
    return resolve(Config.model_validate(fields), config_path="config.json")


def gradients(settings, device, tokens, documents=None):
    """Each bucket's main gradients after two micro-batches of `tokens` (2, 4 * length), and the rank."""
    rank = build_rank(settings, device)
    rank.optimizer.begin_iteration(1, 2)
    for number in range(2):
        slots = tuple(range(4 * number, 4 * number + 4))
        length = tokens.shape[1] // 4
        micro_batch = MicroBatch(seed=7, iteration=1, slots=slots, sequence_length=length, documents=documents)
        part = tokens[number].to(device)
        rank.chunks[0](part, micro_batch, part.roll(1)).backward()
        rank.optimizer.finalize_micro_batch_grads(micro_batch, "backward")
    rank.optimizer.finish_reduction()
    return [bucket.owned.grads.cpu() for bucket in rank.optimizer.buckets], rank


def random_tokens():
    return torch.randint(VOCAB, (2, 4 * SEQ), generator=torch.Generator().manual_seed(3))


def furthest(ours, theirs):
    """The largest difference of a bucket, as a share of its largest element."""
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item()
        for a, b in zip(ours, theirs)
    )


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("policy", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_main_gradients_of_real_buckets(family, policy, recompute):
    settings, tokens = config(policy, family, recompute, model={"hidden_dropout": 0.1}), random_tokens()
    theirs, _ = gradients(config(policy, family, model={"hidden_dropout": 0.1}), CPU, tokens)
    ours, rank = gradients(settings, DEVICE, tokens)
    assert {bucket.grads.dtype for bucket in rank.optimizer.buckets} == {ours[0].dtype}
    assert furthest(ours, theirs) <= TOLERANCE[policy]


@pytest.mark.parametrize("policy", ["fp32", "bf16_sr"])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_apart(family, policy):
    settings, tokens = config(policy, family), random_tokens()
    documents = (5, 27, 1, 31, 32, 16, 16)
    theirs, _ = gradients(settings, CPU, tokens, documents)
    ours, _ = gradients(settings, DEVICE, tokens, documents)
    assert furthest(ours, theirs) <= TOLERANCE[policy]


def test_a_token_that_is_all_of_the_batch():
    """5,120 equal tokens: a bf16 sum that is rounded after each of them would stop at some 256."""
    settings, tokens = config("bf16_sr", batch={"sequence_length": 640}), torch.full((2, 4 * 640), 3)
    theirs, _ = gradients(settings, CPU, tokens)
    ours, _ = gradients(settings, DEVICE, tokens)
    assert furthest(ours, theirs) <= TOLERANCE["bf16_sr"]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kind", ["adamw", "lion"])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16_sr", "bf16_pure"])
def test_the_update_from_equal_gradients_has_equal_bits(policy, kind, kernels):
    """Formulas and noise are the same; torch's fused AdamW, for fp32 states, rounds otherwise on each device."""
    ranks = [
        build_rank(config(policy, optimizer={"kind": kind}, run={"kernels": name}), device)
        for name, device in (("torch", CPU), (kernels, DEVICE))
    ]
    for number in range(1, 4):
        draws = torch.Generator().manual_seed(number)
        for pair in zip(*(rank.optimizer.buckets for rank in ranks)):
            grads = torch.randn(len(pair[0].owned.grads), generator=draws)
            for bucket in pair:
                bucket.owned.grads.copy_(grads)
        step = UpdateStep(number=number, learning_rate=1e-2, peak_learning_rate=1e-2, grad_scale=0.5)
        for rank in ranks:
            rank.optimizer.update(number, step)
    for ours, theirs in zip(*(rank.optimizer.buckets for rank in reversed(ranks))):
        if policy in ("fp32", "bf16") and kind == "adamw":
            torch.testing.assert_close(ours.owned.master.cpu(), theirs.owned.master, rtol=1e-5, atol=1e-6)
            continue
        assert torch.equal(ours.weights.cpu(), theirs.weights)
        assert torch.equal(ours.owned.states.cpu(), theirs.owned.states)


@pytest.mark.parametrize("sums", ["float", "exact"])
@pytest.mark.parametrize("policy", ["fp32", "bf16_sr"])
def test_whole_steps(policy, sums):
    """Losses of four steps: bf16 drifts apart by its roundings."""
    losses = []
    for device in (CPU, DEVICE):
        rank = build_rank(config(policy, precision={"policy": policy, "sums": sums}), device)
        losses.append([train_step(rank).entry.loss for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4 if policy == "fp32" else 2e-2)
    assert losses[0][3] != losses[0][0]


def test_with_exact_sums_and_deterministic_kernels_a_step_can_be_repeated_bit_by_bit():
    settings = config("fp32", precision={"policy": "fp32", "sums": "exact"})
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (gradients(settings, DEVICE, random_tokens())[0] for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
