"""Estimates of layouts on devices, their ranking, and what the command prints."""

import json
import re
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.device.workloads import load_workload
from benchmarks.device_plan import settings_of
from parallel3d.commands import plan
from parallel3d.config.load import check_config, load_config, resolve
from parallel3d.costs.cliffs import explain_best, find_cliffs, parts_of_step
from parallel3d.costs.cost_report import describe_memory, describe_place, describe_width, worst_by_recompute
from parallel3d.costs.failure_costs import failure_costs, width_estimates
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.layout_estimate import estimate_layout
from parallel3d.costs.layout_search import LayoutChoice, candidate_layouts, on_machines, rank_layouts, with_layout
from parallel3d.costs.machines import parse_machines
from parallel3d.costs.pipeline_facts import pipeline_facts
from parallel3d.costs.rental import amount, duration
from parallel3d.errors import UserError
from parallel3d.models.make import make_stage, shardings_of
from parallel3d.pipeline.schedules import SCHEDULES
from parallel3d.rehearsal.config_estimate import estimate_on
from parallel3d.rehearsal.meta_rank import LayeredRehearsal
from tests.support.tiny_runs import make_config

CONFIGS = Path(__file__).parents[2] / "configs"
UNPRICED = {
    "name": "OURS",
    "memory_gib": 80.0,
    "bandwidth": 3.35e12,
    "link_bandwidth": 450e9,
    "bf16_tflops": 989.4,
    "fp32_tflops": 66.9,
}


@cache
def load(name):
    config = resolve(load_config(CONFIGS / f"{name}.json"), config_path="x.json")
    return config, LayeredParameters.of(shardings_of(config.model), config.model.num_hidden_layers)


def machines(text, **options):
    return parse_machines(text, **options)[0]


@cache
def ranked(name, devices):
    return rank_layouts(*load(name), machines(devices))


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["hlat_7b", "gpt2_124m"])
def test_a_step_takes_as_long_as_the_rehearsed_one(name, recompute):
    """To 5 %; the largest found is 4.2 (GPT-2, selective)."""
    config = load_workload(name, settings_of("triton", recompute, 1))
    device = machines("1xH200")
    rehearsed = estimate_on(config, LayeredRehearsal.of(config, make_stage).whole, device.device)
    parts = LayeredParameters.of(shardings_of(config.model), config.model.num_hidden_layers)
    ours = estimate_layout(config, parts, device)
    assert ours.step_s == pytest.approx(rehearsed.step_s, rel=0.05)
    assert ours.mfu == pytest.approx(rehearsed.mfu, rel=0.05)
    assert sum(parts_of_step(ours).values()) == pytest.approx(ours.step_s)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_layer_sends_what_its_rehearsal_sends(sharded, recompute):
    config = make_config(
        model=dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_hidden_layers=2),
        parallel=dict(tp_size=2, sequence_parallel=sharded, recompute=recompute, bucket_mib=1.0),
        batch=dict(global_batch_size=1, micro_batch_size=1, sequence_length=256),
        precision=dict(policy="bf16_sr"),
        run=dict(kernels="triton", device="cuda"),
    )
    rehearsed = LayeredRehearsal.of(config, make_stage)
    works = [rehearsed.layer(phase).works for phase in ("layers", "backward")]
    sent = sum(n * work.num_bytes for each in works for work, n in each.items() if work.kind == "collective")
    parts = LayeredParameters.of(shardings_of(config.model), 2)
    estimate = estimate_layout(config, parts, machines("2xH100"))
    assert estimate.traffic["tp"].num_bytes / 2 == pytest.approx(sent, rel=0.01)
    assert 0.6 * estimate.traffic["tp"].total_s < estimate.traffic["tp"].exposed_s <= estimate.traffic["tp"].total_s


def test_cores_that_exchange_do_not_compute():
    """What GPUs hide, CPUs wait for: reductions, gathers, and the inputs' sums of a tensor-parallel layer."""
    config, parts = load("hlat_7b")
    config = with_layout(config, replace(LayoutChoice.of(config), tp=2, dp=4))
    devices = machines("8xH100")
    cores = replace(devices, device=replace(devices.device, is_cpu=True))
    hidden, waited_for = (estimate_layout(config, parts, each).traffic for each in (devices, cores))
    for axis in ("tp", "dp"):
        assert hidden[axis].exposed_s < hidden[axis].total_s
        assert waited_for[axis].exposed_s == pytest.approx(waited_for[axis].total_s)


@pytest.mark.parametrize(
    ("schedule", "pp", "messages"),
    [("1f1b", 16, 2), ("1f1b", 2, 1), ("interleaved", 2, 3), ("interleaved", 4, 4), ("zb-v", 2, 2), ("zb-v", 4, 4)],
)
def test_what_a_rank_sends_and_what_a_step_waits_for_are_two_things(schedule, pp, messages):
    """Of 4 micro-batches a rank sends few messages, and the step waits for those of all stages in a row."""
    config, parts = load("hlat_7b")
    layout = replace(LayoutChoice.of(config), tp=1, pp=pp, dp=64 // pp, micro_batch=1, schedule=schedule)
    config = with_layout(config, layout)
    few = config.batch.model_copy(update={"num_micro_batches": 4 * 64 // pp})
    devices = machines("8xH100:8")
    estimate = estimate_layout(config.model_copy(update={"batch": few}), parts, devices)
    sent = estimate.traffic["pp"]
    message_s = sent.total_s / (4 * messages)
    assert sent.chain_length == estimate.facts.chain_length >= 2 * (pp - 1)
    assert sent.chain_s == pytest.approx(sent.chain_length * message_s)
    assert message_s > sent.num_bytes / (4 * messages) / sent.bandwidth
    mean_s = sum(estimate.stage_s) / len(estimate.stage_s)
    assert estimate.idle_s == pytest.approx(estimate.facts.idle * mean_s + sent.chain_s + sent.exposed_s)
    assert all(each.exposed_s <= each.total_s for each in estimate.traffic.values())
    slow = replace(devices, device=replace(devices.device, network_bandwidth=1e7, link_bandwidth=1e7))
    outlasted = estimate_layout(config.model_copy(update={"batch": few}), parts, slow).traffic["pp"]
    assert 0 == sent.exposed_s < outlasted.exposed_s < outlasted.total_s


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"])
def test_a_pipeline_idles_as_its_schedule_says(name):
    chunks = SCHEDULES[name].min_chunks
    for stages, count in ((4, 8), (4, 64), (8, 32)):
        facts = pipeline_facts(name, stages, chunks, count)
        assert facts.bubble(count) == pytest.approx(SCHEDULES[name].bubble(stages, chunks, count)), (stages, count)
    most = {"1f1b": 4, "gpipe": 64, "zb-h1": 4, "interleaved": 11, "zb-v": 8}[name]
    assert pipeline_facts(name, 4, chunks, 64).stashed[0] == most


def test_tensor_parallelism_across_hosts_is_a_cliff():
    config, parts = load("hlat_7b")
    layout = replace(LayoutChoice.of(config), tp=16, dp=4)
    near, far = (machines(text) for text in ("16xH100:4", "8xH100:8"))
    near, far = (replace(each, device=replace(each.device, network_bandwidth=3e9)) for each in (near, far))
    near, far = (estimate_layout(with_layout(config, layout), parts, each) for each in (near, far))
    assert far.step_s > 2 * near.step_s
    assert any("crosses hosts" in line for line in find_cliffs(far))
    assert not any("crosses hosts" in line for line in find_cliffs(near))


def test_a_cluster_given_as_one_host_is_a_cliff():
    """64xH100 is one host of 64."""
    config, parts = load("hlat_7b")
    layout = replace(LayoutChoice.of(config), dp=8)
    one, eight = (
        estimate_layout(with_layout(config, layout), parts, machines(text)) for text in ("64xH100", "8xH100:8")
    )
    assert any("64 devices on one host" in line and "8xH100-80GB:8" in line for line in find_cliffs(one))
    assert not any("on one host" in line for line in find_cliffs(eight))


def test_exposed_reductions_and_odd_vocabularies_are_cliffs():
    config, parts = load("hlat_7b")
    slow = machines("8xA100-80GB:32")
    slow = replace(slow, device=replace(slow.device, network_bandwidth=1e9))
    layout = replace(LayoutChoice.of(config), tp=1, dp=256)
    lines = list(find_cliffs(estimate_layout(with_layout(config, layout), parts, slow)))
    assert any("waits for gradients and weights" in line for line in lines)
    odd = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 32_003})})
    odd_parts = LayeredParameters.of(shardings_of(odd.model), odd.model.num_hidden_layers)
    assert any("32,003" in line for line in find_cliffs(estimate_layout(odd, odd_parts, machines("8xH100:256"))))


# --- the ranking ------------------------------------------------------------------------------------------------------

OWN_PLACE = {
    "hlat_7b": ("32xTrn1-16GB:64", (10, 1.25), (40, 1.3)),
    "hlat_70b": ("32xTrn1-16GB:256", (10, 1.15), (150, 1.6)),
}
"""HLAT's devices, and how near its choices are to the best: of its schedule and recomputation 5th of 164 (1.21 times
the best step) and 5th of 75 (1.13) were found, of all schedules 27th of 1,238 (1.23) and 128th of 608 (1.47), as
docs/planning.md says."""


@pytest.mark.parametrize("name", OWN_PLACE)
def test_hlats_choices_fit_and_are_near_the_top(name):
    config, _ = load(name)
    devices, *limits = OWN_PLACE[name]
    found, own = ranked(name, devices), LayoutChoice.of(config)
    everything = [*zip(found.layouts, found.estimates)]
    rivals = [each for each in everything if (each[0].schedule, each[0].recompute) == (own.schedule, own.recompute)]
    for (most, times), ranking in zip(limits, (rivals, everything)):
        place = [layout for layout, _ in ranking].index(own)
        assert place < most and ranking[place][1].step_s < times * ranking[0][1].step_s


def test_the_ranking_is_in_order_valid_and_fits():
    config, _ = load("hlat_7b")
    found = ranked("hlat_7b", "32xTrn1-16GB:64")
    steps = [each.step_s for each in found.estimates]
    assert steps == sorted(steps) and all(each.fits for each in found.estimates)
    assert len(found.estimates) + len(found.too_large) == found.num_tried
    assert min(found.too_large.values()) > 16.0
    assert all(each.tp * each.pp * each.dp == 2048 for each in found.layouts)
    for layout in found.layouts[:: len(found.layouts) // 20]:
        check_config(with_layout(config, layout))
    assert {"tp", "pp", "recompute", "micro_batch"} <= {line.split()[0] for line in explain_best(found)}


def test_a_hundred_thousand_devices():
    """In less than a second of processor time (0.4 s were measured): layouts to try don't grow with the devices."""
    config, parts = load("hlat_70b")
    began_s = time.process_time()
    found = rank_layouts(config, parts, machines("8xH100:12500"))
    assert time.process_time() - began_s < 20
    assert found.estimates and found.estimates[0].machines.num_devices == 100_000 and found.num_tried < 500


def test_key_value_heads_are_whole_or_copied():
    config, _ = load("hlat_7b")
    model = config.model.model_copy(update={"num_attention_heads": 48, "num_key_value_heads": 3})
    layouts = candidate_layouts(config.model_copy(update={"model": model}), 48, ["bf16"])
    assert {layout.tp for layout in layouts} == {1}  # 3 divides neither 2, 4 nor 8, and 11,008 not by 3


def test_policies_are_searched_when_asked():
    config, parts = load("hlat_7b")
    found = rank_layouts(config, parts, machines("8xH100"), ["bf16", "bf16_sr"])
    assert {layout.policy for layout in found.layouts} == {"bf16", "bf16_sr"}


@pytest.mark.parametrize(
    ("devices", "changes", "said"),
    [
        ("8xH100:8", [], r"has place [\d,]+ \([\d.]+ times the best step\): tp8 pp1 dp8,"),
        ("1xH100:12", [], "has no place: 12 devices do not divide into replicas of tp_size \\* pp_size = 8"),
        ("8xA100-40GB:1", ["batch.micro_batch_size=64"], r"does not fit, a rank needs [\d.]+ GiB: tp8 pp1 dp1"),
        ("8xH100:1", ["batch.micro_batch_size=3", "batch.global_batch_size=96"], "did not try micro-batches other"),
        ("8xH100:1", ["parallel.pp_size=8", "parallel.tp_size=1", "parallel.schedule=gpipe"], "try schedules other"),
    ],
)
def test_the_search_says_where_the_configurations_own_layout_is(devices, changes, said):
    """With as many replicas as the devices hold, whatever its dp_size."""
    always = ["parallel.tp_size=8", "parallel.pp_size=1", "parallel.dp_size=16", "batch.num_micro_batches=null"]
    config = resolve(load_config(CONFIGS / "hlat_7b.json", [*always, *changes]), config_path="x.json")
    found = rank_layouts(config, load("hlat_7b")[1], machines(devices))
    [line] = describe_place(found, config, machines(devices))
    assert re.search(said, line), line


# --- failures and width -----------------------------------------------------------------------------------------------


def test_failures_cost_less_when_others_take_over():
    config, parts = load("hlat_70b")
    estimate = estimate_layout(config, parts, machines("32xTrn1-16GB:256"))
    costs = failure_costs(estimate)
    assert costs.failures_per_day == pytest.approx(8192 * 1.5e-5 * 24)
    assert 0.7 < costs.restart < 0.9 < costs.reroute < 1 and costs.one_lost == 31 / 32
    restarts, rerouted = costs.dollars_lost(100.0)
    assert restarts == pytest.approx(100 / costs.restart - 100) and rerouted < restarts
    half, own, double = width_estimates(estimate, parts)
    assert half.machines.num_hosts == 128 and double.config.parallel.dp_size == 64
    assert half.tokens_per_s < own.tokens_per_s < double.tokens_per_s < 2 * own.tokens_per_s


@pytest.mark.parametrize(
    ("devices", "dp", "num_micro_batches", "said"),
    [
        ("8xH100:12", 12, 96, ("6 hosts (dp6)", "24 hosts (dp24)")),
        ("8xH100:13", 13, 20, ("not half: 13 replicas can't be halved", "not twice: 26 replicas need as many")),
        ("16xH100:5", 10, 96, ("not half: 5 hosts can't be halved", "10 hosts (dp20)")),
        ("8xH100:1", 1, 1, ("not half: 1 replica can't be halved", "not twice: 2 replicas need as many")),
    ],
)
def test_a_width_that_cannot_be_says_why(devices, dp, num_micro_batches, said):
    config, parts = load("hlat_7b")
    config = with_layout(config, replace(LayoutChoice.of(config), dp=dp))
    sizes = config.batch.model_copy(update={"num_micro_batches": num_micro_batches})
    estimate = estimate_layout(config.model_copy(update={"batch": sizes}), parts, machines(devices))
    [line] = describe_width(estimate, parts, 1e12)
    assert all(each in line for each in said) and f"(dp{dp})" in line, line


@pytest.mark.parametrize("configured", ["none", "selective", "full"])
def test_the_memory_of_each_mode_of_recomputation(configured):
    """Of the same layout: the configured mode's is that of the table, and each mode keeps less than the one before."""
    config, parts = load("hlat_7b")
    layout = replace(LayoutChoice.of(config), tp=2, pp=4, dp=2, micro_batch=8, recompute=configured)
    config = with_layout(config, layout)
    estimate = estimate_layout(config, parts, machines("8xA100-40GB:2"))
    none, selective, full = worst_by_recompute(estimate, parts).values()
    assert {"none": none, "selective": selective, "full": full}[configured] == estimate.worst
    assert none.activations > selective.activations > full.activations and none.state == full.state
    *_, line = describe_memory(estimate, parts)
    assert f"{configured} {estimate.worst.total / 2**30:.2f} (" in line
    assert full.total < 39.4 * 2**30 < none.total and "does not fit); full" in line


# --- the command ------------------------------------------------------------------------------------------------------


def run_plan(capsys, *arguments):
    code = plan.main(["--config", str(CONFIGS / "hlat_7b.json"), *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_a_table_and_a_verdict(capsys, tmp_path):
    table = tmp_path / "rows.json"
    table.write_text(json.dumps([UNPRICED]))
    code, out, _ = run_plan(
        capsys, "--devices", "8xH100-80GB:16,8xH200:16,8xOURS:16", "--tokens", "1e12", "--device-table", str(table)
    )
    assert code == 0 and out.count("verdict: fits") == 3 and "a million tokens" in out
    assert "H200 SXM on Hyperstack's public list, 2026-08-26" in out
    assert "no price of OURS is known" in out and "failures: " in out and "width: " in out
    code, out, _ = run_plan(capsys, "--devices", "8xH100:1", "--search", "--tokens", "1e9", "--price", "2")
    assert code == 0 and "why the best wins" in out and "$2.00 a device" in out


def test_no_waiting_time_is_above_the_total_that_it_is_of(capsys):
    grid = ["parallel.tp_size=1", "parallel.pp_size=16", "parallel.sequence_parallel=false", "parallel.dp_size=2"]
    sizes = ["batch.global_batch_size=8", "batch.micro_batch_size=1", "batch.num_micro_batches=8"]
    code, out, _ = run_plan(capsys, "--devices", "8xH100:4", *grid, *sizes)
    assert code == 0 and "0.00732 s, of which 0 s outlast its passes" in out
    assert "waits for 34 messages in a row, of all stages: 0.0311 s" in out


@pytest.mark.parametrize(
    ("name", "num_tokens"), [("gpt3_125m", 300e9), ("slw_gpt2_117m_b512", 300_000 * 2**19), ("hlat_7b", 1.8e12)]
)
def test_without_tokens_the_estimate_is_of_the_configurations_run(name, num_tokens):
    """By run.num_tokens or run.num_steps, whichever ends it."""
    assert plan.tokens_of_run(load(name)[0]) == pytest.approx(num_tokens, rel=0.01)


def test_times_and_amounts_have_a_fitting_unit():
    assert [duration(days) for days in (366.2, 1, 0.5, 0.01, 1e-4)] == [
        "366 days",
        "1 days",
        "12 hours",
        "14.4 minutes",
        "8.6 seconds",
    ]
    assert [amount(dollars) for dollars in (12_345.6, 99.5, 0.061)] == ["$12,346", "$99.50", "$0.06"]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("--devices", "8xH10:16"), "unknown device H10: there are H100-80GB"),
        (("--devices", "8xA100:16"), "is one of A100-40GB, A100-80GB"),
        (("--devices", "8*H100"), "as in 8xH100-80GB:16"),
        (("--devices", "0xH100"), "has no device"),
        (("--devices", "3xH100"), "do not divide"),
        (("--devices", "8xH100:4096"), "replicas need as many micro-batches"),
        (("--devices", "8xH100", "--policies", "bf8", "--search"), "--policies bf8: there are fp32"),
        (("--search",), "need --devices"),
    ],
)
def test_a_mistake_is_one_message(capsys, arguments, wrong):
    code, out, err = run_plan(capsys, *arguments)
    assert code == 2 and wrong in err and len(err.strip().splitlines()) == 1 and not out


@pytest.mark.parametrize("value", ["-3", "0", "nan", "inf", "-inf", "1e999", "x"])
@pytest.mark.parametrize("option", ["--price", "--tokens"])
def test_prices_and_tokens_are_above_0(capsys, option, value):
    with pytest.raises(SystemExit):
        run_plan(capsys, "--devices", "8xH100", f"{option}={value}")
    assert f"argument {option}: {value}: give a number above 0" in capsys.readouterr().err


def test_own_devices_and_prices(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps([{"name": "H100-80GB", "price_per_hour": 1.5, "price_source": "our contract"}]))
    found = machines("8xH100:2", table=path)
    assert found.price_per_hour == 24 and found.device.memory_gib == 79.1
    path.write_text(json.dumps({"name": "H100-80GB"}))
    with pytest.raises(UserError, match="no list of devices"):
        machines("8xH100", table=path)
    assert on_machines(load("hlat_7b")[0], found).parallel.dp_size == 2
