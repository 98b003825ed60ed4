"""Which library computes the products of a run on CPUs: by timings, the same for all ranks, starts and resumes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from parallel3d import compiled_loops
from parallel3d.checkpoint.directory import CheckpointDirectory, read_index
from parallel3d.elastic.protocol.restart_policy import StartInstruction
from parallel3d.errors import ConfigError
from parallel3d.kernels import choice
from parallel3d.kernels.c_loops import has_c_loops
from parallel3d.kernels.choice import choose_kernels
from parallel3d.layers.gemm import Gemm, ProductKey, Role
from parallel3d.models.make import make_stage
from parallel3d.worker import attention_timing, gemm_timing
from parallel3d.worker.gemm_timing import (
    LinearShape,
    agree_on_gemm,
    choose_libraries,
    describe_choices,
    is_choice_measured,
    is_form_chosen,
    known_or_measured,
    linear_shapes,
    time_products,
)
from tests.support.launch_runs import finish, start
from tests.support.tiny_runs import make_config
from tests.support.tiny_stages import solo_region

FORWARD, WEIGHT = ProductKey("forward", 8, 4), ProductKey("weight_grad", 8, 4)
CPU = torch.device("cpu")


def shapes_of(**changes):
    config = make_config(precision=dict(policy="fp32"), **changes)
    return gemm_timing._shapes_of_the_run(config, make_stage, CPU)[0]


def test_the_shapes_are_those_of_all_products():
    """Llama: q, k, v fused; output; gate and up fused; down; the head, whose logits exist for all 32 tokens at once."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=257)
    batch = dict(micro_batch_size=2, sequence_length=16)
    expected = {(64, 32), (32, 32), (96, 32), (32, 48), (257, 32)}
    assert shapes_of(model=sizes, batch=batch) == {LinearShape(*size, 32) for size in expected}
    halves = {(32, 32), (32, 16), (48, 32), (32, 24), (129, 32)}
    assert shapes_of(model=sizes, batch=batch, parallel=dict(tp_size=2)) == {LinearShape(*s, 32) for s in halves}


def test_a_large_head_is_timed_on_the_tokens_of_one_weight_gradient():
    model = dict(hidden_size=8, vocab_size=1 << 20, num_attention_heads=2, num_hidden_layers=1)
    config = make_config(model=model, precision=dict(policy="fp32"))
    stage = make_stage(config, range(1), solo_region(), torch.device("meta"))
    assert LinearShape(1 << 20, 8, 16) in linear_shapes(stage, 4096)


@pytest.mark.parametrize(
    "seconds, expected",
    [
        ({"mkl": 1.0, "onednn": 2.0}, "mkl"),
        ({"mkl": 1.0, "onednn": 1.09}, "onednn"),  # timings scatter: the default stays
        ({"mkl": 2.0, "onednn": 1.0}, "onednn"),
    ],
)
def test_the_faster_one_if_it_gains_enough(seconds, expected):
    timings = {FORWARD: seconds, WEIGHT: {"mkl": 3.0, "onednn": 1.0}}
    gemm = choose_libraries(timings)
    assert gemm.choices == ({FORWARD: "mkl"} if expected == "mkl" else {})
    line = describe_choices(gemm, timings)
    assert line == (
        "fp32 products of each role: onednn, and mkl for 1 of 2, where it is up to 2.0 times as fast"
        if expected == "mkl"
        else "fp32 products of each role: onednn is the fastest library for all 2"
    )


def test_every_product_is_timed_on_both_and_the_budget_ends_it(monkeypatch):
    shapes = [LinearShape(8, 4, 100), LinearShape(16, 4, 100)]
    timings = time_products(shapes)
    assert {(key.out_features, key.in_features) for key in timings} == {(8, 4), (16, 4)}
    assert {key.role for key in timings} == {"forward", "input_grad", "weight_grad"}
    assert all(set(each) == {"mkl", "onednn"} and 0 < max(each.values()) < 60 for each in timings.values())
    ticks = iter(range(10_000))
    time_products(shapes, clock=lambda: next(ticks))  # a second at each look: one round that counts for each shape
    num_calls = next(ticks)
    assert num_calls == 1 + 2 * (2 * 6 * 2 + 1) - 6 * 2  # the first round looks at the clock once a product


@pytest.mark.parametrize("tiles_s, text", [(1.0, "onednn, and tiles for 1 of 1"), (1.9, "onednn is the fastest")])
def test_where_there_is_amx_weight_gradients_in_bf16_may_take_tiles(tmp_path, monkeypatch, tiles_s, text):
    config = make_config(precision=dict(policy="bf16"), data=dict(cache_directory=str(tmp_path)))
    timed, store = [], SimpleNamespace(control=Store())

    def give_times(shapes, dtype):
        timed.extend(shapes)
        return {WEIGHT: {"onednn": 2.0, "tiles": tiles_s}}

    monkeypatch.setattr(gemm_timing, "time_products", give_times)
    monkeypatch.setattr(gemm_timing, "has_tiles", lambda: False)
    monkeypatch.setattr(gemm_timing, "multiplies_bf16", lambda: True)
    begin = StartInstruction(attempt=0, checkpoint=None, data=None)
    agree_on_gemm(config, store, CPU, begin, make_stage, is_leader=True)
    assert not timed  # on this machine nothing is to be chosen
    monkeypatch.setattr(gemm_timing, "has_tiles", lambda: True)
    chosen = [agree_on_gemm(config, store, CPU, begin, make_stage, is_leader=leader) for leader in (True, False)]
    assert chosen[0] == chosen[1] and chosen[0].choices == ({WEIGHT: "tiles"} if tiles_s == 1.0 else {})
    assert any(f"bf16 weight gradients: {text}" in record.get("text", "") for record in store.control.records)


@pytest.mark.parametrize(
    "policy, sums, is_widened", [("bf16", "float", True), ("bf16", "exact", False), ("fp32", "float", False)]
)
def test_without_instructions_for_bf16_all_its_products_are_widened(tmp_path, monkeypatch, policy, sums, is_widened):
    """Nothing is timed for it; all ranks take it over, whatever their own processors can do."""
    precision, run = dict(policy=policy, sums=sums), dict(cpu_attention="sdpa", num_steps=1)
    config = make_config(precision=precision, run=run, data=dict(cache_directory=str(tmp_path)))
    context, begin = SimpleNamespace(control=Store()), StartInstruction(attempt=0, checkpoint=None, data=None)
    chosen = []
    for is_leader in (True, False):
        monkeypatch.setattr(gemm_timing, "multiplies_bf16", lambda answer=not is_leader: answer)
        chosen.append(agree_on_gemm(config, context, CPU, begin, make_stage, is_leader=is_leader))
    assert chosen[0] == chosen[1]
    assert ("widened" in chosen[0].choices.values()) == is_widened
    if is_widened:
        sizes = {(shape.out_features, shape.in_features) for shape in shapes_of()}
        assert set(chosen[0].choices) == {ProductKey(role, *size) for role in get_args(Role) for size in sizes}
        assert set(chosen[0].choices.values()) == {"widened"}
        assert any("widened to fp32" in record.get("text", "") for record in context.control.records)
        assert Gemm.from_json(chosen[0].to_json()).choices == chosen[0].choices


@pytest.mark.parametrize(
    "line, expected",
    [
        ("flags : fpu avx512_bf16 sse", True),
        ("Features : fp asimd bf16", True),
        ("flags : avx512f avx512_vnni", False),
        ("", False),
    ],
)
def test_the_processors_own_list_says_whether_it_multiplies_bf16(monkeypatch, line, expected):
    monkeypatch.setattr(compiled_loops, "_cpu", lambda: line)
    assert compiled_loops.multiplies_bf16() == expected


@pytest.mark.parametrize(
    "whole, timed",
    [
        (LinearShape(192, 576, 100), LinearShape(192, 576, 100)),  # small: all of it
        (LinearShape(8192, 512, 2048), LinearShape(512, 512, 1024)),
        (LinearShape(4096, 14336, 4096), LinearShape(64, 14336, 1024)),
        (LinearShape(100, 1000, 4096), LinearShape(100, 1000, 1024)),
    ],
)
def test_a_part_of_a_large_product_is_timed_with_all_tokens_that_weight_gradients_need(whole, timed):
    assert gemm_timing.timed_part(whole, torch.float32) == timed


def test_in_bf16_a_smaller_part_of_a_product_is_timed():
    assert gemm_timing.timed_part(LinearShape(8192, 512, 2048), torch.bfloat16) == LinearShape(512, 512, 256)


def test_the_costliest_product_decides_for_all_of_its_role(tmp_path, monkeypatch):
    """In fp32; weight gradients in bf16 are all timed, and each has its own library."""
    small, wide = LinearShape(8, 4, 100), LinearShape(32, 4, 50)
    timed = []

    def give_times(shapes, dtype):
        timed.append(list(shapes))
        other = "mkl" if dtype is torch.float32 else "tiles"
        keys = [ProductKey("weight_grad", shape.out_features, shape.in_features) for shape in shapes]
        seconds = {key: {other: key.out_features / 32, "onednn": 2.0} for key in keys}
        return seconds | {ProductKey("forward", *keys[0][1:]): {other: 3.0, "onednn": 2.0}}

    monkeypatch.setattr(gemm_timing, "time_products", give_times)
    monkeypatch.setattr(gemm_timing, "multiplies_bf16", lambda: True)
    chosen, text = known_or_measured([small, wide], tmp_path)
    assert timed.pop() == [wide]
    assert chosen.choices == {ProductKey("weight_grad", *size): "mkl" for size in ((8, 4), (32, 4))}
    assert text == "fp32 products of each role: onednn, and mkl for 1 of 2, where it is up to 2.0 times as fast"
    known_or_measured([small, wide], tmp_path, dtype=torch.bfloat16)
    assert timed == [[small, wide]]


def test_both_measurements_at_the_start_may_take_less_than_300_ms():
    assert gemm_timing.BUDGET_S + attention_timing.BUDGET_S < 0.3


def test_candidates_in_bf16_are_two_ways_to_a_weights_gradient():
    timings = time_products([LinearShape(8, 4, 100)], dtype=torch.bfloat16)
    assert {key.role: set(each) for key, each in timings.items()} == {"weight_grad": {"onednn", "tiles"}}


def test_the_choices_are_made_once_for_a_machine(tmp_path, monkeypatch):
    shapes = [LinearShape(8, 4, 100)]
    monkeypatch.setattr(gemm_timing, "time_products", lambda shapes, dtype: {FORWARD: {"mkl": 1.0, "onednn": 2.0}})
    first = known_or_measured(shapes, tmp_path / "cache")
    monkeypatch.setattr(gemm_timing, "time_products", lambda shapes, dtype: {FORWARD: {"mkl": 2.0, "onednn": 1.0}})
    assert known_or_measured(shapes, tmp_path / "cache") == first and first[0].choices == {FORWARD: "mkl"}
    (file,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(gemm_timing, "timed_loops", lambda: ("other code",))
        assert known_or_measured(shapes, tmp_path / "cache")[0].choices == {}, "measured again"
    assert known_or_measured([LinearShape(8, 4, 200)], tmp_path / "cache")[0].choices == {}, "other shapes"
    file.write_text("{")
    assert known_or_measured(shapes, tmp_path / "cache")[0].choices == {}, "a damaged file is as none"
    (tmp_path / "file").touch()
    assert known_or_measured(shapes, tmp_path / "file")[0].choices == {}, "no folder can be made there"


def test_choices_survive_json():
    gemm = Gemm(choices={FORWARD: "mkl", WEIGHT: "onednn"}, attention="blocks", kernels="c")
    assert Gemm.from_json(json.loads(json.dumps(gemm.to_json()))) == gemm
    for wrong in (
        {"sideways 8x4": "mkl"},
        {"forward 8x4": "blas"},
        {"forward 8": "mkl"},
        {"attention": "mkl"},
        {"kernels": "mkl"},
    ):
        with pytest.raises(ValueError):
            Gemm.from_json(wrong)


@pytest.mark.parametrize(
    "precision, run, device, expected",
    [
        (dict(policy="fp32"), {}, "cpu", True),
        (dict(policy="fp16"), {}, "cpu", True),
        (dict(policy="bf16"), {}, "cpu", True),  # if the leader has AMX, or nothing for bf16
        (dict(policy="bf16", sums="exact"), {}, "cpu", False),
        (dict(policy="fp64"), {}, "cpu", False),
        (dict(policy="fp32", sums="exact"), {}, "cpu", False),
        (dict(policy="fp32"), dict(cpu_gemm="mkl"), "cpu", False),
        (dict(policy="fp32"), {}, "meta", False),
    ],
)
def test_when_a_measurement_decides(precision, run, device, expected):
    config = make_config(precision=precision, run=dict(num_steps=1, **run))
    assert is_choice_measured(config, torch.device(device)) == expected


class Store:
    """What the leader tells the others."""

    def __init__(self):
        self.values, self.records, self.token = {}, [], None

    def set(self, key, value):
        self.values[key] = value

    def get(self, key, token):
        return self.values[key]

    def publish(self, record):
        self.records.append(record)


@pytest.mark.parametrize("has_compiler", [True, False])
def test_all_ranks_take_over_the_leaders_choices(tmp_path, monkeypatch, has_compiler):
    config = make_config(precision=dict(policy="fp32"), data=dict(cache_directory=str(tmp_path)))
    context = SimpleNamespace(control=Store())
    monkeypatch.setattr(gemm_timing, "time_products", lambda shapes, dtype: {FORWARD: {"mkl": 1.0, "onednn": 2.0}})
    monkeypatch.setattr(gemm_timing, "time_attention", lambda attention: {"sdpa": 1.0, "blocks": 2.0})
    monkeypatch.setattr(gemm_timing, "has_c_loops", lambda: has_compiler)
    begin = StartInstruction(attempt=0, checkpoint=None, data=None)
    chosen = [
        agree_on_gemm(config, context, CPU, begin, make_stage, is_leader=is_leader) for is_leader in (True, False)
    ]
    choices = {ProductKey("forward", shape.out_features, shape.in_features): "mkl" for shape in shapes_of()}
    assert chosen[0] == chosen[1] == Gemm(choices=choices, kernels="c" if has_compiler else "torch")
    assert {"kind": "environment", "cpu_gemm": chosen[0].to_json()} in context.control.records


@pytest.mark.parametrize("kernels", ["c", "torch"])
def test_a_run_that_names_its_kernels_measures_as_well(tmp_path, monkeypatch, kernels):
    """The shapes come from a stage without storage, for which there are no kernels in C."""
    config = make_config(run=dict(num_steps=1, kernels=kernels), data=dict(cache_directory=str(tmp_path)))
    config = config.model_copy(update={"precision": config.precision.model_copy(update={"policy": "fp32"})})
    monkeypatch.setattr(gemm_timing, "time_products", lambda shapes, dtype: {FORWARD: {"mkl": 1.0, "onednn": 2.0}})
    monkeypatch.setattr("parallel3d.kernels.choice.has_c_loops", lambda: True)
    context, begin = SimpleNamespace(control=Store()), StartInstruction(attempt=0, checkpoint=None, data=None)
    chosen = agree_on_gemm(config, context, CPU, begin, make_stage, is_leader=True)
    assert {(key.role, library) for key, library in chosen.choices.items()} == {("forward", "mkl")}


@pytest.mark.parametrize(
    "changes, device, expected",
    [
        ({}, "cpu", True),
        (dict(precision=dict(policy="bf16")), "cpu", True),
        (dict(precision=dict(policy="fp64")), "cpu", False),
        (dict(precision=dict(policy="fp32", sums="exact")), "cpu", False),
        (dict(run=dict(num_steps=1, kernels="torch")), "cpu", False),
        (dict(run=dict(num_steps=1, compile="elementwise")), "cpu", False),
        ({}, "meta", False),
    ],
)
def test_when_the_machine_decides_on_kernels_in_c(changes, device, expected):
    config = make_config(**dict(precision=dict(policy="fp32")) | changes)
    assert is_form_chosen(config, torch.device(device)) == expected


def test_kernels_in_c_need_a_cpu_and_a_compiler(monkeypatch):
    """Auto is never in C by itself: another rank without a compiler would compute other bits."""
    assert choose_kernels("auto", CPU) == "torch" and choose_kernels("torch", CPU, agreed="c") == "torch"
    monkeypatch.setattr(choice, "has_c_loops", lambda: True)
    assert choose_kernels("auto", CPU, agreed="c") == choose_kernels("c", CPU) == "c"
    with pytest.raises(ConfigError, match="the run is on meta"):
        choose_kernels("c", torch.device("meta"))
    monkeypatch.setattr(choice, "has_c_loops", lambda: False)
    for asked in ("auto", "c"):
        with pytest.raises(ConfigError, match="no C compiler"):
            choose_kernels(asked, CPU, agreed="c")


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_gpu_takes_triton_where_it_is_installed(monkeypatch, is_installed):
    """Whatever the ranks have agreed on for CPUs."""
    monkeypatch.setattr(choice, "find_spec", lambda name: object() if is_installed else None)
    gpu = torch.device("cuda", 1)
    assert choose_kernels("auto", gpu, agreed="c") == ("triton" if is_installed else "torch")
    assert choose_kernels("torch", gpu, agreed="c") == "torch"
    if is_installed:
        assert choose_kernels("triton", gpu) == "triton"
    else:
        with pytest.raises(ConfigError, match="Triton is not installed"):
            choose_kernels("triton", gpu)


def test_triton_on_a_cpu_is_refused_but_in_its_interpreter(monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    for is_interpreted in (True, False):
        monkeypatch.setattr(choice, "is_interpreted", lambda answer=is_interpreted: answer)
        assert choose_kernels("auto", CPU) == "torch"
        if is_interpreted:
            assert choose_kernels("triton", CPU) == "triton"
        else:
            with pytest.raises(ConfigError, match="the run is on cpu, and Triton's kernels are for GPUs"):
                choose_kernels("triton", CPU)


@pytest.mark.full
@pytest.mark.slow
def test_a_run_that_resumes_keeps_the_choices(tmp_path):
    """The first start finds choices in the cache, the second one only in its checkpoint."""
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"text {number} about nothing in particular. " * 80 for number in range(50))
    )
    config = {
        "model": dict(
            vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
        ),
        "parallel": {"dp_size": 2},
        "batch": {"global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 64},
        "optimizer": {"learning_rate": 1e-3},
        "data": {
            "sources": [str(tmp_path / "text.txt")],
            "document_chars": 2000,
            "cache_directory": str(tmp_path / "cache"),
        },
        "monitor": {"charts": False},
        "run": {"num_steps": 2, "threads_per_rank": 1, "directory": str(tmp_path / "run"), "evaluate_at_end": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def train(*flags):
        code, out, err = finish(start("--config", tmp_path / "config.json", *flags))
        assert code == 0, out + err
        return json.loads((tmp_path / "run" / "environment.json").read_text()).get("cpu_gemm"), out

    first, out = train()
    assert first is not None and "fp32 products of each role: " in out
    (file,) = (tmp_path / "cache").glob("cpu_gemm-*.json")
    given = {"forward 192x64": "mkl", "weight_grad 64x128": "mkl"}
    file.write_text(json.dumps({"choices": given, "text": "fp32 products: as given"}))
    given |= {"kernels": "c"} if has_c_loops() else {}
    assert train()[0] == given
    file.unlink()
    train("run.resume=auto", "run.num_steps=3")
    assert read_index(CheckpointDirectory(tmp_path / "run" / "checkpoints").path_of(3)).facts.cpu_gemm == given
