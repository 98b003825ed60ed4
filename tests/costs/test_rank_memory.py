"""Planned memory beside that of real ranks: threads whose tensors are counted, and steps rehearsed on meta tensors."""

import pytest

from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.rank_memory import (
    CPU_LOGIT_GRADS_BYTES,
    CPU_LOGITS_BYTES,
    CPU_LOGITS_TOKENS,
    estimate_memory,
    rotary_bytes,
)
from parallel3d.layers import cross_entropy
from parallel3d.models.make import make_stage, shardings_of
from parallel3d.rehearsal.ideal_counts import HEAD_BLOCK_BYTES
from parallel3d.rehearsal.meta_rank import rehearse
from tests.costs.counted_ranks import parts_of, run_counted
from tests.support.tiny_runs import make_config

MODEL = dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4)
BATCH = dict(global_batch_size=16, micro_batch_size=2, sequence_length=64)


def configure(layout, policy="fp32", **changes):
    layout = dict(layout)
    changes = {"model": {}, "batch": {}, "elastic": {}, **changes}
    changes["model"] = {**changes["model"], **layout.pop("model", {})}
    changes["elastic"] = {**changes["elastic"], **layout.pop("elastic", {})}
    changes["batch"] = {**BATCH, **changes["batch"], **layout.pop("batch", {})}
    changes["model"] = {**MODEL, **changes["model"]}
    return make_config(parallel=dict(bucket_mib=0.05, **layout), **{"precision": dict(policy=policy), **changes})


# --- state: exact -----------------------------------------------------------------------------------------------------

GPT2 = dict(architecture="gpt2", qkv_bias=True)
STATES = {
    "one rank": dict(),
    "three replicas": dict(layout=dict(dp_size=3, batch=dict(global_batch_size=18))),
    "without backups": dict(layout=dict(dp_size=4, elastic=dict(zero_backups=0))),
    "not sharded": dict(layout=dict(dp_size=2, zero_stage=0)),
    "copied heads": dict(layout=dict(tp_size=4, model=dict(num_key_value_heads=2))),
    "sharded tokens": dict(layout=dict(tp_size=2, sequence_parallel=True, dp_size=2), model=GPT2),
    "a tied embedding": dict(layout=dict(pp_size=2, dp_size=2, model=dict(tie_word_embeddings=True))),
    "a tied embedding in a V": dict(
        layout=dict(pp_size=2, dp_size=2, schedule="zb-v", virtual_stages=2, model=dict(tie_word_embeddings=True))
    ),
    "uneven stages": dict(layout=dict(pp_size=2, stage_replicas=[2, 3], model=dict(tie_word_embeddings=True))),
    "room to grow": dict(layout=dict(dp_size=2, elastic=dict(max_replicas=5))),
    "padded vocabulary": dict(layout=dict(tp_size=2, dp_size=2, model=dict(vocab_size=511))),
    "master weights": dict(layout=dict(dp_size=2), policy="bf16"),
    "narrow": dict(layout=dict(dp_size=2), policy="bf16_sr"),
    "narrow terms": dict(
        layout=dict(dp_size=2), precision=dict(policy="bf16_sr", stochastic_rounding=["accumulation"])
    ),
    "exact sums": dict(layout=dict(dp_size=2), precision=dict(policy="fp32", sums="exact")),
    "exact sums on one": dict(layout=dict(dp_size=1), precision=dict(policy="bf16", sums="exact")),
    "one state": dict(layout=dict(dp_size=2), optimizer=dict(kind="lion")),
    "matrices": dict(layout=dict(dp_size=2, tp_size=2), optimizer=dict(kind="muon")),
}


def buffers_of(runtime):
    """Bytes of the rank's buffers as the optimizer has allocated them: weights, gradients, owned, backups."""
    weights = gradients = 0
    ranges = []
    for bucket in runtime.optimizer.buckets:
        own = [bucket._grads, *([bucket._totals] if bucket._totals is not bucket._grads else [])]
        weights += bucket._weights.nbytes
        gradients += sum(each.nbytes for each in own)
        pointers = {each.untyped_storage().data_ptr() for each in own}
        for number, shard in enumerate(bucket.shards):
            held = [shard.states, *([shard.master] if bucket.has_master else [])]
            reduced = {each.untyped_storage().data_ptr(): each for each in (shard.grads, shard.sums) if each.numel()}
            held += [each for pointer, each in reduced.items() if pointer not in pointers]
            ranges.append((min(number, 1), sum(each.nbytes for each in held)))
    return weights, gradients, *(sum(size for kind, size in ranges if kind == which) for which in (0, 1))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", STATES)
def test_state_is_that_of_the_buffers(name):
    case = {"layout": {}, **STATES[name]}
    config = configure(**case)
    planned = [memory.state for memory in estimate_memory(config, parts_of(config), on_device=False)]
    for runtime, _ in run_counted(config, steps=0):
        state = planned[runtime.coordinates.pp]
        found = buffers_of(runtime)
        ours = (state.weights, state.gradients, state.optimizer, state.backup)
        if name == "matrices":  # ranges of matrices differ: the plan has the longest
            assert ours[:2] == found[:2] and found[2] <= ours[2]
        else:
            assert ours == found, runtime.coordinates
        assert state.num_buckets == len(runtime.optimizer.buckets)


# --- the peak of a step -----------------------------------------------------------------------------------------------

LAYOUTS = {
    "one rank": dict(),
    "tp2": dict(tp_size=2),
    "tp2 sharded tokens": dict(tp_size=2, sequence_parallel=True),
    "dp2": dict(dp_size=2),
    "dp2 not sharded": dict(dp_size=2, zero_stage=0),
    "dp4": dict(dp_size=4),
    "dp3 without backups": dict(dp_size=3, elastic=dict(zero_backups=0), batch=dict(global_batch_size=18)),
    "full": dict(recompute="full"),
    "pp2": dict(pp_size=2),
    "pp2 selective": dict(pp_size=2, recompute="selective"),
    "pp2 gpipe": dict(pp_size=2, schedule="gpipe"),
    "pp4 zb-h1": dict(pp_size=4, schedule="zb-h1"),
    "pp2 zb-v": dict(pp_size=2, schedule="zb-v", virtual_stages=2),
    "pp2 interleaved": dict(pp_size=2, schedule="interleaved", virtual_stages=2),
    "pp2 dp2 tied": dict(pp_size=2, dp_size=2, model=dict(tie_word_embeddings=True)),
    "tp2 pp2 dp2": dict(tp_size=2, sequence_parallel=True, pp_size=2, dp_size=2),
}
TOLERANCE = 0.07
"""Largest found of these 48: 5.3 %; issue: 10."""


@pytest.fixture(scope="module", autouse=True)
def made_once():
    """Tables that threads share are made by the first run of a process, and count in no other."""
    for policy in ("bf16_sr", "fp32"):
        run_counted(configure({}, policy), steps=1)


@pytest.mark.each_value(rest=12)
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16_sr"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_peak_is_that_of_a_run_in_threads(layout, policy):
    config = configure(LAYOUTS[layout], policy)
    planned = estimate_memory(config, parts_of(config), on_device=False)
    found = run_counted(config, steps=2)
    for memory in planned:
        most = max(peak for runtime, peak in found if runtime.coordinates.pp == memory.stage)
        assert memory.tensors == pytest.approx(most, rel=TOLERANCE), memory.stage


FAMILIES = {
    "llama": dict(),
    "grouped heads": dict(num_key_value_heads=2),
    "gpt2": dict(architecture="gpt2"),
    "dropout": dict(architecture="gpt2", hidden_dropout=0.1, tie_word_embeddings=True),
    "qwen3": dict(architecture="qwen3"),
    "gemma2": dict(architecture="gemma2"),
    "a large vocabulary": dict(vocab_size=50257),
}


@pytest.mark.each_value
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("policy", ["bf16_sr", "bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_takes_as_much_as_its_rehearsed_step(family, policy, recompute, tp):
    """To 3 %, of what comes and goes within the step alone; Gemma 2, whose outputs are normed, to 7: up to 6.1 % more
    than planned was found."""
    model = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8, vocab_size=4096)
    config = make_config(
        model={**model, **FAMILIES[family]},
        parallel=dict(tp_size=tp, sequence_parallel=tp > 1, recompute=recompute, bucket_mib=1.0),
        batch=dict(global_batch_size=2, micro_batch_size=1, sequence_length=1024),
        precision=dict(policy=policy),
        run=dict(kernels="triton", device="cuda"),
    )
    rehearsed = rehearse(config, make_stage)
    [memory] = estimate_memory(config, parts_of(config))
    passing = rehearsed.peak_bytes - rehearsed.state_bytes + rotary_bytes(config)
    assert memory.tensors - memory.state.total == pytest.approx(passing, rel=0.07 if family == "gemma2" else 0.03)
    assert memory.state.total == rehearsed.state_bytes - rotary_bytes(config)
    assert memory.total > memory.tensors


def test_blocks_of_logits_are_those_of_the_head():
    sizes = (CPU_LOGITS_BYTES, CPU_LOGITS_TOKENS, CPU_LOGIT_GRADS_BYTES, HEAD_BLOCK_BYTES)
    layers = (
        cross_entropy.TOKEN_BLOCK_BYTES,
        cross_entropy.LEAST_BLOCK_TOKENS,
        cross_entropy.GRADIENT_BLOCK_BYTES,
        cross_entropy.DEVICE_TOKEN_BLOCK_BYTES,
    )
    assert sizes == layers


def test_parts_make_stages():
    config = configure(dict(model=dict(tie_word_embeddings=True)))
    parts = LayeredParameters.of(shardings_of(config.model), 4)
    names = [each.name for each in parts.of_stage([range(2, 4)])]
    assert names[0].startswith("layers.2.") and names[-1] == "embedding.weight" and "final_norm.weight" in names
    whole = [each.name for each in parts.of_stage([range(4)])]
    assert len(whole) == len(set(whole)) == len(shardings_of(config.model))
