"""Variants of a benchmark take their steps in turn, and stand still in between; nothing is timed here."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from benchmarks import contestants, cpu
from benchmarks.contestants import Run, Variant
from benchmarks.peers.workload import Workload
from benchmarks.turns import OurProcesses, PeerProcesses, marked_processes, stands_still, take_turns
from parallel3d.monitor.run_folder import METRICS, read_metrics

TINY = Workload(
    vocab_size=1024,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    sequence_length=16,
    micro_batch_size=1,
    global_batch_size=4,
)
OPTIONS = cpu.parse_arguments(["--steps", "2", "--cores", "2"])
PAUSE_S = 3.0
"""Longer than the quickstart's heartbeat may be late."""


def variant(name: str) -> Variant:
    return next(each for each in contestants.VARIANTS if each.name == name)


def names(group: list[Variant]) -> list[str]:
    return [each.name for each in group]


def test_a_group_is_the_variants_of_a_layout_with_what_they_are_compared_with():
    groups = cpu.groups_of(cpu.select("machine,plain,ours,torch pp2"), TINY)
    assert {layout: names(group) for layout, group in groups.items()} == {
        "single": ["machine single", "plain", "ours single"],
        "dp2": ["machine dp2", "plain", "ours dp2"],
        "tp2": ["machine tp2", "plain", "ours tp2", "ours tp2+sp"],
        "pp2": ["machine dp2", "plain", "ours pp2", "ours pp2 zb-h1", "torch pp2"],
    }
    assert list(cpu.groups_of(cpu.select("machine,plain,ours dp2"), TINY)) == ["dp2"]
    assert list(cpu.groups_of(cpu.select("machine,plain"), TINY)) == ["single", "dp2", "tp2"]


def test_ratios_are_those_of_the_same_turn():
    assert cpu.typical_ratio([150.0, 80.0, 300.0], [100.0, 80.0, 150.0]) == 1.5
    assert cpu.typical_ratio([90.0, 60.0, 300.0], [100.0, 80.0, 300.0]) == 0.9
    assert cpu.typical_ratio([90.0, 80.0, 70.0], [100.0]) == 0.8
    assert cpu.typical_ratio([90.0], []) is None


def test_each_group_has_a_table_of_its_own():
    def run(name: str, beside: str, speed: float) -> Run:
        return Run(name=name, round=0, beside=beside, tokens_per_s=[speed])

    runs = [run("plain", "single", 10.0), run("ours single", "single", 12.0)]
    runs += [run("plain", "pp2", 20.0), run("machine dp2", "pp2", 40.0), run("ours pp2", "pp2", 24.0)]
    _, single, pp2 = cpu.report(TINY, runs).split("In turn, ")
    assert "| ours single | 12 | 12 | 1.20 | - |" in single and "| litgpt \\* |" in single
    assert "| ours pp2 | 24 | 24 | 1.20 | 0.75 (below 0.80) |" in pp2 and "| litgpt \\* |" not in pp2
    assert "| picotron pp2 \\* |" in pp2 and "| picotron dp2 \\* |" not in pp2


def test_another_tree_takes_turns_with_this_one(tmp_path):
    ours = [variant("plain"), variant("ours tp2")]
    (theirs,) = cpu.of_tree(tmp_path, ours)
    assert theirs == replace(ours[1], name="baseline tp2", tree=tmp_path, goal=None)
    assert contestants.our_command(theirs, TINY, tmp_path, OPTIONS, 1)[1] == str(tmp_path / "launch/train.py")
    assert contestants.our_environment(theirs) == {"PYTHONPATH": str(tmp_path)}
    both = [*ours, theirs]
    assert names(cpu.groups_of(both, TINY)["tp2"]) == ["plain", "ours tp2", "baseline tp2"]
    speeds = zip(names(both), (5.0, 12.0, 10.0))
    runs = [Run(name=name, round=0, beside="tp2", tokens_per_s=[speed]) for name, speed in speeds]
    text = cpu.report(TINY, runs, both)
    assert "| baseline tp2 | 10 | 10 | 2.00 | - |  |" in text
    assert "ours tp2: 1.20 of baseline tp2" in text.splitlines()


@pytest.mark.slow
def test_a_run_of_ours_stands_still_between_its_turns_and_loses_nobody(tmp_path):
    processes = OurProcesses(variant("ours dp2"), TINY, tmp_path, OPTIONS)
    try:
        processes.run_step()
        for _ in range(2):
            num_steps = len(contestants.our_steps(tmp_path))
            pids = list(marked_processes(processes.mark))
            assert len(pids) >= 3 and all(map(stands_still, pids)), "the command and two workers"
            time.sleep(PAUSE_S)
            assert len(contestants.our_steps(tmp_path)) == num_steps
            assert processes.run_step() < OPTIONS.timeout_s
            assert len(contestants.our_steps(tmp_path)) > num_steps
        assert 0 < processes.figures()["loss"] < 10
    finally:
        processes.end()
    assert not list(marked_processes(processes.mark))
    assert "membership" not in {line.get("event") for line in read_metrics(tmp_path / "run" / METRICS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "machine dp2",
        "machine_with_exchanges tp2",
        "machine_with_exchanges tp2+sp",
        "machine_whole_step single",
        "machine_whole_step tp2",
        "machine_whole_step tp2+sp",
    ],
)
def test_a_peer_stands_still_between_its_turns(tmp_path, name):
    processes = PeerProcesses(variant(name), TINY, tmp_path, OPTIONS)
    try:
        seconds = [processes.run_step() for _ in range(3)]
        for rank in range(variant(name).num_processes):
            assert len(contestants.peer_steps(tmp_path, rank)) == 3
        assert seconds == [took for took, _ in contestants.peer_steps(tmp_path)] and min(seconds) > 0
        kernels = set(processes.figures()["kernel_gflops"] or ())
        assert bool(kernels) is (name.split()[0] not in ("plain", "machine_whole_step"))
        assert ("sum (bytes)" in kernels) is (name == "machine_with_exchanges tp2")
        assert ("all-gather (bytes)" in kernels) is (name == "machine_with_exchanges tp2+sp")
    finally:
        processes.end()


@pytest.mark.slow
def test_a_failed_variant_ends_alone():
    broken = replace(variant("plain"), name="broken", module="benchmarks.peers.nobody")
    failed, plain = take_turns([broken, variant("plain")], TINY, OPTIONS, round_index=1, beside="single")
    assert failed.error and "nobody" in failed.error and failed.tokens_per_s == []
    assert plain.error is None and len(plain.tokens_per_s) == 2 and plain.loss > 0
    assert (plain.round, plain.beside) == (1, "single")
