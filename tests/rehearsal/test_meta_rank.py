"""A rehearsed step: of a model of any number of layers, of any rank of a grid."""

from itertools import groupby

import pytest

from parallel3d.accelerator import MetaAccelerator
from parallel3d.config.load import resolve
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.models.make import make_stage
from parallel3d.rehearsal.meta_rank import LayeredRehearsal, rehearse

SEQ = 256


def config(layers=3, warmup=None, model=None, **parallel):
    return resolve(
        Config.model_validate(
            {
                "model": {
                    "vocab_size": 512,
                    "hidden_size": 64,
                    "intermediate_size": 96,
                    "num_hidden_layers": layers,
                    "num_attention_heads": 4,
                    **(model or {}),
                },
                "warmup": warmup or {},
                "parallel": {"dp_size": 1, "bucket_mib": 0.01, **parallel},
                "batch": {"global_batch_size": 4, "micro_batch_size": 2, "sequence_length": SEQ},
                "precision": {"policy": "bf16_sr"},
                "optimizer": {"learning_rate": 1e-3},
                "run": {"num_steps": 3},
            }
        ),
        config_path="config.json",
    )


def test_layers_that_are_alike_need_not_all_be_counted():
    whole, layered = rehearse(config(5), make_stage), LayeredRehearsal.of(config(5), make_stage).whole
    assert {name: each.num_kernels for name, each in whole.phases.items()} == {
        name: each.num_kernels for name, each in layered.phases.items()
    }
    assert whole.total.elementwise_bytes == layered.total.elementwise_bytes
    assert whole.total.flops("product") == layered.total.flops("product")
    assert (whole.num_buckets, whole.num_elements) == (layered.num_buckets, layered.num_elements)
    assert whole.state_bytes == layered.state_bytes
    assert whole.peak_bytes == pytest.approx(layered.peak_bytes, rel=0.01)


def test_products_are_those_of_the_model():
    """6 FLOPs for each weight of a product and each token, of a step's two micro-batches."""
    total, tokens = rehearse(config(), make_stage).total, 4 * SEQ
    weights = 3 * (4 * 64 * 64 + 3 * 64 * 96) + 512 * 64
    by_norms = sum(n * work.flops for work, n in total.works.items() if work.narrowest == 1)
    assert total.flops("product") - by_norms == 6 * weights * tokens
    attention = 3 * 4 * SEQ * 64 // 2 * tokens  # 4 FLOPs for a query, a key and an element of a head; half are masked
    assert total.flops("attention") == attention and total.flops("attention_backward") == 5 * attention // 2


def test_tensor_parallel_ranks_share_the_products_and_meet_in_collectives():
    solo, shared = (rehearse(config(tp_size=tp, sequence_parallel=tp > 1), make_stage).total for tp in (1, 2))
    assert shared.flops("product") == pytest.approx(solo.flops("product") / 2, rel=0.01)
    collectives = {work.name for work in shared.works if work.kind == "collective"}
    assert collectives == {"all_gather", "reduce_scatter", "all_reduce", "all_reduce_max"}
    assert not any(work.kind == "collective" for work in solo.works)


class LoggedEvent:
    def __init__(self, log):
        self.log = log

    def record(self, stream):
        self.log.append("record")

    def query(self):
        return True

    def elapsed_time(self, end_event):
        self.log.append("read")
        return 1.0


def test_a_device_is_timed_without_a_kernel_or_a_wait(monkeypatch):
    """Its events are read after the step's one wait for the numbers."""
    plain = rehearse(config(), make_stage).total
    log, wait = [], MetaAccelerator.synchronize
    monkeypatch.setattr(MetaAccelerator, "timed_event", lambda self: LoggedEvent(log))
    monkeypatch.setattr(MetaAccelerator, "synchronize", lambda self: (log.append("wait"), wait(self)))
    assert rehearse(config(), make_stage).total == plain and "record" not in log
    log.clear()
    asked = config()
    balanced = asked.model_copy(update={"elastic": asked.elastic.model_copy(update={"balance": True})})
    assert rehearse(balanced, make_stage).total == plain
    num_waits, log = log.count("wait"), [each for each, _ in groupby(log)]
    assert log == ["record", "wait", "read"] * 2 and num_waits == 2


def test_a_warmup_does_not_shorten_the_rehearsed_sequences():
    warmup = {"sequence_length": {"kind": "linear", "start": 16, "duration": 100}}
    short = rehearse(config(1, warmup=warmup), make_stage).total
    assert short.flops("product") == rehearse(config(1), make_stage).total.flops("product")


def test_a_window_leaves_out_scores():
    """Its kernel is for sequences of many lengths: SEQ / 4 keys a query, but for the first ones of a sequence."""
    whole, window = (
        rehearse(config(1, model={"architecture": "mistral", "sliding_window": size}), make_stage).total
        for size in (None, SEQ // 4)
    )
    assert {work.name for work in window.works if work.kind == "attention"} == {"_varlen_attn"}
    for kind in ("attention", "attention_backward"):
        assert window.flops(kind) == whole.flops(kind) * 7 // 16


def test_only_a_replica_on_one_stage_is_rehearsed():
    with pytest.raises(UserError, match="one replica, on one stage"):
        rehearse(config(4, pp_size=2), make_stage)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_costs_kernels_and_saves_memory(recompute):
    kept, recomputed = (rehearse(config(recompute=mode), make_stage) for mode in ("none", recompute))
    assert recomputed.phases["backward"].num_kernels > kept.phases["backward"].num_kernels
    assert recomputed.peak_bytes < kept.peak_bytes and recomputed.state_bytes == kept.state_bytes
    more = recomputed.total.flops("product") / kept.total.flops("product")
    assert more == 1.0 if recompute == "selective" else 1.0 < more < 4 / 3
