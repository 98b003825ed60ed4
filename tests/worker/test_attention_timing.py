"""Which form of attention a run on CPUs uses: by timings, the same for all ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parallel3d.elastic.protocol.restart_policy import StartInstruction
from parallel3d.kernels.c_loops import has_c_loops
from parallel3d.layers.gemm import Gemm
from parallel3d.models.make import make_stage
from parallel3d.worker import attention_timing, gemm_timing
from parallel3d.worker.attention_timing import (
    AttentionShape,
    attention_shape,
    choose_form,
    describe_form,
    is_attention_measured,
    time_attention,
    timed_part,
)
from parallel3d.worker.gemm_timing import agree_on_gemm
from tests.support.tiny_runs import make_config
from tests.support.tiny_stages import solo_region
from tests.worker.test_gemm_timing import Store

CPU, META = torch.device("cpu"), torch.device("meta")
BF16 = dict(policy="bf16")


def shape_of(**changes):
    config = make_config(**changes)
    return attention_shape(config, make_stage(config, range(1), solo_region(), META))


def test_the_shape_is_that_of_a_micro_batch():
    model = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    batch = dict(micro_batch_size=2, sequence_length=16)
    expected = AttentionShape(
        num_sequences=2, length=16, num_query_heads=4, num_kv_heads=2, head_size=8, dtype=torch.bfloat16
    )
    assert shape_of(model=model, batch=batch, precision=BF16) == expected
    fp16 = dict(policy="fp16")
    assert shape_of(model=model, batch=batch, precision=fp16) == replace(expected, dtype=torch.float32)
    model |= dict(architecture="mistral")
    assert shape_of(model=dict(model, sliding_window=16), batch=batch, precision=BF16) == expected, "hides nothing"
    assert shape_of(model=dict(model, sliding_window=4), batch=batch, precision=BF16) is None


@pytest.mark.parametrize("sdpa, blocks, expected", [(1.0, 0.5, "blocks"), (1.0, 0.97, "sdpa"), (1.0, 2.0, "sdpa")])
def test_the_faster_one_if_it_gains_enough(sdpa, blocks, expected):
    timings = {"sdpa": sdpa, "blocks": blocks}
    assert choose_form(timings) == expected
    assert f"attention: {expected}; " in describe_form(timings) and f"{sdpa / blocks:.1f} times" in describe_form(
        timings
    )


@pytest.mark.parametrize(
    "sequences, length, heads, kv_heads, num_threads, timed",
    [
        (2, 256, 4, 2, 1, (2, 256, 4, 2)),  # small: all of it
        (64, 256, 4, 2, 1, (4, 256, 4, 2)),
        (4, 512, 8, 8, 1, (1, 512, 4, 4)),
        (4, 512, 8, 8, 16, (2, 512, 8, 8)),  # busy threads
        (1, 512, 12, 4, 8, (1, 512, 6, 2)),  # whole groups
        (1, 1536, 32, 4, 2, (1, 1536, 2, 1)),  # part of a group
        (8, 131_072, 32, 8, 1, (1, 1536, 1, 1)),
    ],
)
def test_a_part_of_attention_is_timed(sequences, length, heads, kv_heads, num_threads, timed):
    num_sequences, timed_length, num_query_heads, num_kv_heads = timed
    whole = AttentionShape(
        num_sequences=sequences,
        length=length,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_size=64,
        dtype=torch.float32,
    )
    assert timed_part(whole, num_threads) == replace(
        whole,
        num_sequences=num_sequences,
        length=timed_length,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
    )


def test_both_forms_are_timed_and_the_budget_ends_it():
    shape = AttentionShape(
        num_sequences=2, length=8, num_query_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32
    )
    timings = time_attention(shape)
    if has_c_loops():
        time_attention(replace(shape, kernels="c"))
    assert set(timings) == {"sdpa", "blocks"} and 0 < max(timings.values()) < 60


@pytest.mark.parametrize(
    "first, second, num_rounds, sdpa",
    [
        ({"sdpa": 20, "blocks": 10}, {"sdpa": 15, "blocks": 9}, 2, 15),
        ({"sdpa": 20, "blocks": 5}, {"sdpa": 15, "blocks": 5}, 1, 20),  # far apart
        ({"sdpa": 0.01, "blocks": 0.001}, {"sdpa": 0.01, "blocks": 0.001}, 4, 0.01),  # quick
    ],
)
def test_the_budget_ends_timings_that_have_decided(monkeypatch, first, second, num_rounds, sdpa):
    """Libraries prepare themselves before, for a thousand seconds."""
    now, calls = [0.0], []

    def take_time(q, k, v, *, form, kernels):
        now[0] += (1000 if q.shape[1] == 16 else first[form] if len(calls) < 4 else second[form])
        calls.append((form, q.shape[1]))
        return q

    monkeypatch.setattr(attention_timing, "attend", take_time)
    monkeypatch.setattr(attention_timing.torch.autograd, "grad", lambda *_: None)
    shape = AttentionShape(
        num_sequences=1, length=32, num_query_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32
    )
    assert time_attention(shape, clock=lambda: now[0])["sdpa"] == pytest.approx(sdpa)
    assert calls == [("sdpa", 16), ("blocks", 16)] + [("sdpa", 32), ("blocks", 32)] * num_rounds


@pytest.mark.parametrize(
    "changes, device, expected",
    [
        (dict(precision=BF16), "cpu", True),
        (dict(precision=dict(policy="fp32")), "cpu", True),
        (dict(precision=BF16), "meta", False),
        (dict(precision=dict(policy="fp64")), "cpu", False),
        (dict(precision=dict(policy="bf16", sums="exact")), "cpu", False),
        (dict(precision=BF16, run=dict(cpu_attention="blocks")), "cpu", False),
        (dict(precision=BF16, data=dict(document_mask=True)), "cpu", False),
        (dict(precision=BF16, parallel=dict(recompute="selective")), "cpu", True),
    ],
)
def test_when_a_measurement_decides(changes, device, expected):
    assert is_attention_measured(make_config(**changes), torch.device(device)) == expected


def test_all_ranks_take_over_the_leaders_choice(tmp_path, monkeypatch):
    """In bf16 products have no choice on most processors for it, so attention alone is measured."""
    config = make_config(
        precision=BF16, data=dict(cache_directory=str(tmp_path)), run=dict(kernels="torch", num_steps=1)
    )
    context = SimpleNamespace(control=Store())
    monkeypatch.setattr(gemm_timing, "has_tiles", lambda: False)
    monkeypatch.setattr(gemm_timing, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(gemm_timing, "time_attention", lambda shape: {"sdpa": 2.0, "blocks": 1.0})
    begin = StartInstruction(attempt=0, checkpoint=None, data=None)
    chosen = [agree_on_gemm(config, context, CPU, begin, make_stage, is_leader=leads) for leads in (True, False)]
    assert chosen[0] == chosen[1] == Gemm(attention="blocks")
    assert {"kind": "environment", "cpu_gemm": {"attention": "blocks"}} in context.control.records


@pytest.mark.parametrize("device, expected", [("cpu", "blocks"), ("meta", "sdpa")])
def test_the_configured_form_is_for_cpus(device, expected):
    run = dict(cpu_attention="blocks", cpu_gemm="mkl", kernels="torch")
    config = make_config(precision=BF16, run=run)
    begin = StartInstruction(attempt=0, checkpoint=None, data=None)
    chosen = agree_on_gemm(config, SimpleNamespace(), torch.device(device), begin, make_stage, is_leader=True)
    assert chosen == Gemm(default="mkl", attention=expected)
