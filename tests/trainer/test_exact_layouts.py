"""With exact sums the layout does not change a bit: not of an entry, a gradient, a weight, or an evaluation."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.support import tiny_runs

# Sizes at which kernels add in another order as soon as addresses, threads or the number of terms differ.
SHAPE = dict(
    model=dict(hidden_size=54, intermediate_size=51, num_attention_heads=3, hidden_dropout=0.1),
    batch=dict(global_batch_size=8, micro_batch_size=1, sequence_length=17),
)
LAYOUTS = {
    "pp2": dict(pp_size=2),
    "pp4-gpipe": dict(pp_size=4, schedule="gpipe"),
    "dp4": dict(dp_size=4),
    "dp4-zero0": dict(dp_size=4, zero_stage=0),
    "dp3-no-backups": dict(dp_size=3),
    "pp2-dp2-small-buckets": dict(pp_size=2, dp_size=2, bucket_mib=0.001),
    "pp2-dp2-zb-h1": dict(pp_size=2, dp_size=2, schedule="zb-h1"),
    "pp2-dp2-interleaved": dict(pp_size=2, dp_size=2, schedule="interleaved", virtual_stages=2),
    "stages-1-3-interleaved": dict(pp_size=2, stage_replicas=[1, 3], schedule="interleaved", virtual_stages=2),
    "pp2-dp2-zb-v": dict(pp_size=2, dp_size=2, schedule="zb-v", virtual_stages=2),
    "stages-1-3-zb-v": dict(pp_size=2, stage_replicas=[1, 3], schedule="zb-v", virtual_stages=2),
    "stages-1-3": dict(pp_size=2, stage_replicas=[1, 3]),
    "stages-1-3-whole": dict(pp_size=2, stage_replicas=[1, 3], split_backward="never"),
}
PRECISIONS = {
    **{policy: dict(policy=policy) for policy in ("fp32", "fp16", "bf16", "bf16_sr")},
    "bf16_sr-everywhere": dict(policy="bf16_sr", stochastic_rounding=["accumulation", "outputs"]),
}


TIED = ["pp2", "pp4-gpipe", "dp4", "dp4-zero0", "pp2-dp2-zb-h1", "stages-1-3-zb-v", "stages-1-3"]


@cache
def run(layout: str | None, precision: str, tied: bool = False):
    backups = 0 if layout == "dp3-no-backups" else 1
    return tiny_runs.train_in_threads(
        **{**SHAPE, "model": {**SHAPE["model"], "tie_word_embeddings": tied}},
        parallel=LAYOUTS[layout] if layout else {},
        precision=dict(**PRECISIONS[precision], sums="exact"),
        elastic=dict(zero_backups=backups),
    )


CELLS = [
    *((layout, precision, False) for precision in PRECISIONS for layout in LAYOUTS),
    *((layout, "fp32", True) for layout in TIED),
    *(
        (layout, policy, True)
        for policy in ("fp16", "bf16_sr", "bf16_sr-everywhere")
        for layout in ("pp2", "stages-1-3")
    ),
]


@pytest.mark.sample(9, rest=18)
@pytest.mark.parametrize(
    "layout, precision, tied",
    CELLS,
    ids=[f"{precision}-{layout}{'-tied' if tied else ''}" for layout, precision, tied in CELLS],
)
def test_every_layout_is_the_same_run_bit_for_bit(layout: str, precision: str, tied: bool):
    ours, one = run(layout, precision, tied), run(None, precision, tied)
    assert ours.entries == one.entries and ours.evaluation == one.evaluation
    for name in one.weights:
        assert torch.equal(ours.gradients[name], one.gradients[name]), name
        assert torch.equal(ours.weights[name], one.weights[name]), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [dict(architecture="gpt2"), dict(num_key_value_heads=1)], ids=str)
def test_other_models_and_copied_heads_at_equal_tensor_parallel_size(model):
    """Three ranks, with three key-value heads or each with a copy of the one that there is."""
    one, ours = (
        tiny_runs.train_in_threads(
            **{**SHAPE, "model": SHAPE["model"] | model},
            parallel=dict(tp_size=3, **layout),
            precision=dict(policy="fp32", sums="exact"),
        )
        for layout in ({}, dict(pp_size=2, stage_replicas=[1, 2], schedule="zb-h1"))
    )
    assert ours.entries == one.entries and ours.evaluation == one.evaluation
    for name in one.weights:
        assert torch.equal(ours.gradients[name], one.gradients[name]), name
        assert torch.equal(ours.weights[name], one.weights[name]), name


def test_floats_do_not_do_that():
    """Else the test above would show nothing."""
    runs = [
        tiny_runs.train_in_threads(**SHAPE, parallel=parallel, precision=dict(policy="fp32"))
        for parallel in ({}, dict(dp_size=4))
    ]
    assert any(not torch.equal(runs[0].weights[name], runs[1].weights[name]) for name in runs[0].weights)
