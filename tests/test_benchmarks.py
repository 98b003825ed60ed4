"""The benchmark's scripts parse, its processes end, its tables match the runs; nothing is timed here."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import balance, bubble, contestants, cpu, data_wait, micro_batch, preempt, rejoin, restarts, step_parts
from benchmarks.peers import machine, machine_with_memory
from benchmarks.peers.workload import Workload, add_workload, read_workload
from parallel3d.config.derived import world_size
from parallel3d.config.load import load_config, resolve
from parallel3d.trainer.plans import Plans, build_grid

ROOT = Path(__file__).parents[1]
WORKLOAD = Workload()


def variants(*names: str) -> list[contestants.Variant]:
    return [c for c in contestants.VARIANTS if c.name in names]


def row(table: str, name: str) -> list[str]:
    return next(
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if f"| {name} |" in line
    )


def test_help_without_torch():
    code = "import sys; from benchmarks import cpu; assert 'torch' not in sys.modules; cpu.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "--rounds" in done.stdout, done.stderr


@pytest.mark.parametrize("module", sorted({c.module for c in contestants.VARIANTS if c.module}))
def test_a_peer_is_a_script_that_knows_its_kinds(module: str):
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    tree = ast.parse(source)
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    for variant in contestants.VARIANTS:
        if variant.module == module:
            assert all(f'"{argument}"' in source for argument in variant.arguments)


def test_the_control_plane_of_many_workers_starts_and_survives_and_takes_them_back():
    command = [sys.executable, "benchmarks/scale.py", "--workers", "64", "--batch", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=6000)
    assert done.returncode == 0, done.stderr
    parts = [line.split()[2] for line in done.stdout.splitlines()[1:]]
    assert parts == ["start", "loss", "groups", "regroup", "offer", "join", "takeover"]


@pytest.mark.parametrize("name", bubble.SCHEDULES)
def test_the_stages_that_sleep_have_a_plan(name: str):
    config = bubble.sleeping_config(bubble.SCHEDULES[name], 8, 1)
    plan = Plans(config, build_grid(config)).train(config.batch.num_micro_batches)
    planned = {"1f1b": 3 / 11, "interleaved, 2 chunks": 3 / 19, "zb-h1": 3 / 27}
    assert plan.bubble == pytest.approx(planned[name])


def test_the_workload_survives_a_command_line():
    parser = argparse.ArgumentParser()
    add_workload(parser)
    workload = Workload(hidden_size=64, policy="bf16", micro_batch_size=2)
    assert read_workload(parser.parse_args(workload.arguments())) == workload


def test_the_bytes_that_elementwise_work_moves():
    small = Workload(vocab_size=8, hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2)
    small = replace(small, sequence_length=2, micro_batch_size=3, policy="bf16")
    found = {t.name: (t.count, t.num_bytes) for t in machine_with_memory.elementwise_traffic(small, 1, 2)}
    hidden, inner, numbers = 2 * 3 * 2 * 4, 2 * 3 * 2 * 6, 2 * (4 * 16 + 3 * 24) + 2 * 32
    assert found == {
        "norm of a sum": (4, 4 * hidden),
        "norm's gradient": (4, 4 * hidden),
        "positions": (4, 4 * hidden),
        "SwiGLU": (2, 3 * inner),
        "SwiGLU's gradient": (2, 6 * inner),
        "update": (1, 30 * numbers // 2),
    }
    halved = {t.name: t.num_bytes for t in machine_with_memory.elementwise_traffic(small, 2, 1, shards_tokens=True)}
    assert halved["norm of a sum"] == halved["norm's gradient"] == 2 * hidden and halved["positions"] == 2 * hidden
    for traffic in machine_with_memory.elementwise_traffic(small, 1, 2):
        for run in machine_with_memory.stream(traffic).ways.values():
            for _ in range(traffic.count + 1):
                run()


def test_the_limit_takes_the_way_that_is_usually_the_fastest():
    """The last step's time in it, even where another way was luckier in that step; the update's counts once a step."""
    ways = {"torch": int, "ours": int}
    product = machine.Kernel(name="qkv", count=2, flops=3e9, ways=ways)
    update = machine.Kernel(name="update", count=1, flops=0.0, ways={"copy": int}, is_of_step=True)
    times = machine.Times()
    for torch_s, ours_s in ((1.0, 2.0), (3.0, 2.0), (1.0, 2.0), (3.0, 0.5), (1.5, 1.0)):
        times.add(product, {"torch": torch_s, "ours": ours_s})
        times.add(update, {"copy": 7.0})
    assert times.step_s([product, update], num_micro_batches=4) == 4 * 1.5 + 7.0
    assert times.gflops(product) == {"torch": 2 * 3.0 / 1.5, "ours": 2 * 3.0 / 2.0}
    assert machine.slowest(3.0) == 3.0


def test_a_part_within_another_counts_for_itself():
    times = iter((0.0, 1.0, 3.0, 10.0, 20.0, 20.5))
    timer = micro_batch.PartTimer(clock=lambda: next(times))
    with timer.part("all"), timer.part("norm"):
        pass
    assert timer.wrap("norm", max)(3, 4) == 4
    assert timer.seconds == {"all": 8.0, "norm": 2.5}


def test_the_parts_of_a_micro_batch_are_timed(capsys: pytest.CaptureFixture[str]):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"vocab_size": 128, "sequence_length": 32, "micro_batch_size": 2}
    workload, threads = Workload(policy="bf16", **small), torch.get_num_threads()
    micro_batch.main([*workload.arguments(), "--rounds", "2", "--threads", str(threads)])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:-2]]
    by_part = {row[0]: row[1:] for row in rows}
    roles = {*micro_batch.ROLES.values(), micro_batch.ATTENTION}
    assert set(by_part) == {*micro_batch.PARTS.values(), *roles, micro_batch.REST, micro_batch.STREAMS, "all"}
    assert {part for part, cells in by_part.items() if all(cells)} == roles  # in the model, and alone


@pytest.mark.parametrize("variant", [c for c in contestants.VARIANTS if c.module is None], ids=lambda c: c.name)
def test_our_configuration_is_valid(variant: contestants.Variant, tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(contestants.our_config(variant, WORKLOAD, tmp_path / "run", num_cores=2, num_steps=5)))
    config = resolve(load_config(path), config_path=path)
    assert world_size(config) == variant.num_processes
    assert world_size(config) * config.run.threads_per_rank == 2
    assert config.run.num_steps == 5


@pytest.mark.slow
def test_a_real_run_of_ours_has_the_speed_of_each_step():
    tiny = Workload(vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    tiny = replace(tiny, sequence_length=16, micro_batch_size=1, global_batch_size=4)
    options = cpu.parse_arguments(["--steps", "2", "--cores", "2"])
    (variant,) = variants("ours dp2")
    found = contestants.measure(variant, tiny, 0, options)
    assert found.error is None and len(found.tokens_per_s) == 2 and 0 < found.loss < 10


def test_select():
    assert [c.name for c in cpu.select("torch pp2,ours")][-2:] == ["ours pp2 zb-h1", "torch pp2"]
    assert len(cpu.select(None)) == len({c.name for c in contestants.VARIANTS})
    with pytest.raises(SystemExit, match="nobody"):
        cpu.select("ours,nobody")


def test_the_table_of_speeds():
    runs = [
        contestants.Run(name="machine single", round=0, tokens_per_s=[2000.0]),
        contestants.Run(name="machine dp2", round=0, tokens_per_s=[2500.0]),
        contestants.Run(name="plain", round=0, tokens_per_s=[900.0, 1000.0], loss=9.0),
        contestants.Run(name="plain", round=1, tokens_per_s=[1000.0, 1100.0, 3000.0], loss=8.5),
        contestants.Run(name="ours single", round=0, tokens_per_s=[1700.0], loss=7.0),
        contestants.Run(name="ours pp2", round=0, tokens_per_s=[1400.0]),
        contestants.Run(name="torch pp2", round=0, error="Error: a | b"),
    ]
    chosen = variants(*{run.name for run in runs})
    table = cpu.speed_table(chosen, WORKLOAD, runs)
    assert row(table, "plain")[1:] == ["1,000", "3,000", "1.00", "0.50", "8.50"]
    assert row(table, "ours single")[1:] == ["1,700", "1,700", "1.70", "0.85 (at least 0.85)", "7.00"]
    assert row(table, "ours pp2")[4] == "0.70 (below 0.80)"  # of 2,500 x (1 - 1/5)
    assert "1 of 1 runs failed: Error: a \\| b" in table
    assert row(table, "torchtitan dp2 \\*")[1:4] == ["768 to 796", "", "0.77 to 0.80"]


@pytest.mark.parametrize(
    "policy, name, cell",
    [
        ("fp32", "ours dp2", "0.88 (at least 0.85)"),
        ("bf16", "ours dp2", "0.88 (below 0.90)"),
        ("bf16", "ours tp2", "0.88 (at least 0.75)"),
    ],
)
def test_what_is_wanted_depends_on_the_format(policy: str, name: str, cell: str):
    limit = name.replace("ours", "machine")
    speeds = {limit: [100.0], name: [88.0]}
    runs = [contestants.Run(name=each, round=0, tokens_per_s=values) for each, values in speeds.items()]
    assert row(cpu.speed_table(variants(limit, name), Workload(policy=policy), runs), name)[4] == cell


def test_the_table_without_the_plain_loop_has_no_ratios():
    runs = [contestants.Run(name="ours dp2", round=0, tokens_per_s=[10.0])]
    table = cpu.speed_table(variants("ours dp2"), WORKLOAD, runs)
    assert row(table, "ours dp2")[3:5] == ["-", "-"]
    assert "torchtitan" not in table


def test_the_table_of_kernels():
    runs = [
        contestants.Run(name="machine single", round=0, kernel_gflops={"qkv forward": {"torch": 100.0, "ours": 200.4}}),
        contestants.Run(name="plain", round=0, tokens_per_s=[1.0]),
    ]
    assert row(cpu.kernel_table(runs), "qkv forward")[1:] == ["100 / 200"]
    assert cpu.kernel_table(runs[1:]) == ""


def test_a_failing_process_ends_the_others_and_says_why(tmp_path: Path):
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    failing = [sys.executable, "-c", "raise ValueError('no such thing')"]
    started = time.monotonic()
    with pytest.raises(contestants.RunFailed, match="exit code 1: ValueError: no such thing"):
        contestants.run_processes([sleeper, failing], [{}, {}], tmp_path, 30)
    assert time.monotonic() - started < 50


def test_a_late_process_is_killed_with_its_children(tmp_path: Path):
    code = (
        "import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(c.pid, flush=True); time.sleep(60)"
    )
    with pytest.raises(contestants.RunFailed, match="not done after 1 s"):
        contestants.run_processes([[sys.executable, "-c", code]], [{}], tmp_path, 1)
    pid = int((tmp_path / "rank-0.log").read_text())
    assert is_gone(pid)


def is_gone(pid: int) -> bool:
    """True once the process has ended; an orphan may stay a zombie until init looks."""
    for _ in range(50):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_the_error_in_a_log(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("start\nRuntimeError: gloo\nbye\n\n")
    assert contestants.last_error(log) == "RuntimeError: gloo"
    log.write_text("")
    assert contestants.last_error(log) == "no output"


@pytest.mark.full
def test_the_benchmark_of_checkpoints(tmp_path):
    """Two tiny saves of each kind; nothing is left in the folder."""
    small = "--hidden-size 64 --num-hidden-layers 1 --sequence-length 8 --vocab-size 64 --saves 2 --steps 1 --warmup 1"
    out = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint.py"), *small.split(), "--out", str(out)]
    (tmp_path / "disk").mkdir()
    done = subprocess.run(
        [*command, "--directory", str(tmp_path / "disk")], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["saved_mb"] > 0 and figures["ours_num_steps"] >= 1 and figures["torch_num_steps"] >= 1
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.full
def test_the_benchmark_of_sources(tmp_path):
    """Tokens of a megabyte are prepared, indexed and read; nothing is left in the folder."""
    small = "--kinds tokens --size-mb 1 --prepare-mb 1 --seconds 0.01"
    command = [sys.executable, str(ROOT / "benchmarks" / "sources.py"), *small.split(), "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert float(row(done.stdout, "tokens")[3].split()[0]) > 10  # MB at the peak
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_the_benchmark_of_generation():
    """Both write the same text."""
    small = "--width 128 --layers 1 --turns 2 --threads 1"
    command = [sys.executable, str(ROOT / "benchmarks" / "generation.py"), *small.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 texts are equal" in done.stdout


def test_a_slow_tokenizer_has_a_row_with_a_thread_and_with_a_process():
    kind, *figures = data_wait.compare(data_wait.Slow(1e-4, holds_lock=True), 0.5).rsplit(maxsplit=5)
    computing, tokenising, _, by_thread, by_process = map(float, figures)
    assert kind == "holds the lock" and (computing, tokenising) == (0, 0) and min(by_thread, by_process) > 0


def test_the_account_of_restarts():
    lines = [
        {"event": "ended", "exit_code": 3, "time": 10.0},
        {"event": "restart", "lost_steps": 4, "wait_s": 1.0, "time": 10.1},
        {"event": "notice", "text": "timeouts: heartbeat 0.50 s", "time": 13.5},
    ]
    assert restarts.describe(lines, lines[1]) == {"exit_code": 3, "lost_steps": 4, "wait_s": 1.0, "back_s": 3.5}
    steps = [[{"loss": loss} for loss in losses] for losses in ([3.0, 2.0, 1.0], [3.0, 2.0, 1.5])]
    assert restarts.first_difference(*steps) == 2
    assert [fault["step"] for fault in restarts.plan_faults(24)] == [11, 17, 23]


def test_what_a_lost_worker_costs_by_a_join_and_by_a_restart():
    """A restart goes back to its checkpoint, a join repeats no completed step; neither counts what had been done."""
    steps = [{"step": step} for step in range(1, 8)]
    loss, join = ({"event": "membership", "who": who, "joined": []} for who in ([{"rank": 1}], []))
    assert rejoin.events_of_losses([*steps, loss, join]) == [7]
    assert rejoin.account([*steps, loss, join, {"step": 8}], 0) == (7, 0)
    restarted = [*steps[:4], {"event": "restart", "step": 4, "lost_steps": 3}, *steps[4:6]]
    assert rejoin.account(restarted, 0) == (7, 3) and rejoin.newest_step(restarted) == 6
    losses = [rejoin.Loss(back_s=seconds, num_repeated=3) for seconds in (2.0, 4.0, 3.0)]
    assert rejoin.loss_row("tiny", losses, []) == "| tiny | a restart | 3.000 | 4.000 | 3 | - | - |"
    assert rejoin.loss_row("tiny", losses[:1], [0.1, 0.3]) == "| tiny | a join | 2.000 | 2.000 | 3 | 0.200 | 0.300 |"


def test_the_parts_of_a_step():
    """Nested instructions and other threads don't count, nor does the first step."""

    def span(name, start, duration, tid=1):
        return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": duration, "tid": tid}

    events = [span("step 1", 0, 900), span("forward 0", 0, 900), span("step 2", 1000, 10_000)]
    events += [span("forward 0", 1000, 4000), span("part of it", 2000, 500), span("receive gradient 0", 6000, 3000)]
    events += [span("gloo:all_reduce", 6000, 1000, tid=2), {"ph": "M", "name": "process_name"}]
    assert step_parts.parts_of(events) == {"step": 10.0, "forward": 4.0, "receive": 3.0, "rest": 3.0}


def test_what_routes_by_speed_have_brought_is_said():
    times = [0.2] * 2 + [0.4] * 13 + [0.7] + [0.26] * 36 + [0.3] * 10 + [0.2] * 10
    steps = [{"step": number, "loss": 4.0, "step_s": step_s} for number, step_s in enumerate(times, 1)]
    rows = ((15, {"pp0 dp3 (rank 3)": 2.0}, 0.625), (60, {}, 0.667))
    changes = [{"event": "balance", "step": step, "slow": slow, "step_share": share} for step, slow, share in rows]
    said = "\n".join(balance.describe([*steps, *changes], [4.0] * 71 + [3.0], slow_steps=50))
    assert "step 0.400 s with equal shares, 0.260 s with the routes by speed: 0.650 x" in said
    assert "measured / planned: 1.040" in said and "after the speed has returned: 0.200 s" in said
    assert "bit for bit: 71 of 72" in said and "slow are pp0 dp3 (rank 3) 2 x; planned 0.625 x" in said


def test_what_notices_did_is_counted():
    times = {"agree_s": 0.25, "repair_s": 0.5, "regroup_s": 0.25}
    changes = [
        {"event": "membership", "why": "rank 0 drained", "joined": [], "live": 5, **times},
        {"event": "membership", "why": "lost rank 1", "joined": [], "live": 4, **times},
        {"event": "membership", "why": "", "joined": [{"rank": 6}], "live": 5, **times},
    ]
    steps = [{"step": number, "loss": loss} for number, loss in ((1, 4.0), (2, 3.5), (2, 3.0))]
    steps[1]["num_attempts"] = 2
    said = "\n".join(preempt.describe([*steps, *changes], [1.0, 3.0], [4.0, 3.5, 2.0]))
    assert "2 hosts were taken away, 1 came; workers at the end: 5" in said
    assert "empty after 2.000 [3.000] s; a change paused the run for 1.000 [1.000] s" in said
    assert "3, each once: False, begun twice: 1; changes by a loss: 1" in said
    assert "bit for bit: 2 of 3; the last 3.0000" in said
