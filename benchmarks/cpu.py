"""Measures training speed on CPUs: parallel3d, its peers and the machine's limit, in turn, in one session.

    python benchmarks/cpu.py --rounds 3 --steps 6 --out build/cpu.json

Every variant trains the same model on the same number of cores: one process with all of them, or two with half
each. They run one after the other, round after round (A B C ... A B C ...), each in processes of its own, so that noise
and heat affect all of them alike. The machine's limits (peers/machine*.py) are among them. Nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers.workload import Workload, add_workload, read_workload
from parallel3d.monitor.environment import describe_environment

WARMUP_STEPS = 2  # memory is touched and kernels are built for the first time
POLL_S = 0.2
MAX_IDLE_LOAD = 0.3
MALLOC_KEEP_BYTES = str(2**30)
"""Keeps freed memory in the process: activations cause no page faults. Ours sets it itself; peers get it, too."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train the workload. `module` is a peer's script, none means launch/train.py."""

    name: str
    layout: str
    module: str | None = None
    arguments: tuple[str, ...] = ()
    parallel: Mapping[str, Any] = field(default_factory=dict)
    goal: float | None = None
    bf16_goal: float | None = None

    def goal_in(self, policy: str) -> float | None:
        """The share of the machine's bound that is wanted in a format."""
        return self.bf16_goal if policy == "bf16" and self.bf16_goal is not None else self.goal

    @property
    def num_processes(self) -> int:
        return 1 if self.layout == "single" else 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of one variant in one round: tokens per second of each step after the warmup, or an error."""

    name: str
    round: int
    tokens_per_s: list[float] = field(default_factory=list)
    loss: float = math.nan
    kernel_gflops: Mapping[str, Mapping[str, float]] | None = None
    wall_s: float = 0.0
    load_before: float = 0.0
    error: str | None = None


PEERS = "benchmarks.peers."
TORCH, DEEPSPEED, HF = PEERS + "torch_parallel", PEERS + "deepspeed", PEERS + "huggingface"

VARIANTS: tuple[Variant, ...] = (
    *(
        Variant(name=f"{module} {kind}", layout=kind, module=PEERS + module, arguments=(kind,))
        for module in ("machine", "machine_in_order", "machine_with_memory")
        for kind in ("single", "dp2", "tp2")
    ),
    Variant(name="plain", layout="single", module=PEERS + "plain"),
    Variant(name="ours single", layout="single", goal=0.85, bf16_goal=0.9),
    Variant(name="ours dp2", layout="dp2", parallel={"dp_size": 2}, goal=0.85, bf16_goal=0.9),
    Variant(name="ours tp2", layout="tp2", parallel={"tp_size": 2}, goal=0.75),
    Variant(name="ours tp2+sp", layout="tp2", parallel={"tp_size": 2, "sequence_parallel": True}, goal=0.75),
    Variant(name="ours pp2", layout="pp2", parallel={"pp_size": 2}, goal=0.80),
    Variant(name="ours pp2 zb-h1", layout="pp2", parallel={"pp_size": 2, "schedule": "zb-h1"}, goal=0.80),
    Variant(name="huggingface", layout="single", module=HF, arguments=("single",)),
    Variant(name="huggingface ddp2", layout="dp2", module=HF, arguments=("ddp",)),
    Variant(name="deepspeed zero1 dp2", layout="dp2", module=DEEPSPEED, arguments=("zero1",)),
    Variant(name="deepspeed pp2", layout="pp2", module=DEEPSPEED, arguments=("pipeline",)),
    Variant(name="torch fsdp2 dp2", layout="dp2", module=TORCH, arguments=("fsdp",)),
    Variant(name="torch tp2+sp", layout="tp2", module=TORCH, arguments=("tp",)),
    Variant(name="torch pp2", layout="pp2", module=TORCH, arguments=("pp",)),
)

PLAIN_TOKENS_PER_S_ELSEWHERE = 1340.0
ELSEWHERE: tuple[tuple[str, str, float, float], ...] = (
    ("litgpt", "single", 1181, 1181),
    ("torchtitan dp2", "dp2", 1029, 1066),
    ("torchtitan tp2+sp", "tp2", 923, 923),
    ("torchtitan pp2", "pp2", 934, 978),
    ("picotron dp2", "dp2", 1106, 1106),
    ("picotron tp2", "tp2", 870, 870),
    ("picotron pp2", "pp2", 878, 901),
)
"""Peers that pip does not install: name, layout and tokens/s (lowest, highest median), measured with this workload in
fp32 on 2 cores of an Intel processor with AVX-512 and AMX, where the plain loop made PLAIN_TOKENS_PER_S_ELSEWHERE."""


class RunFailed(Exception):
    """A variant failed or timed out."""


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds the stack, which ends the current run
    workload, variants = read_workload(options), select(options.only)
    if os.getloadavg()[0] > MAX_IDLE_LOAD:
        print(f"warning: other work is running (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    runs: list[Run] = []
    for index in range(options.rounds):
        for variant in variants:
            run = measure(variant, workload, index, options)
            runs.append(run)
            print(f"round {index + 1}: {describe(run)}", file=sys.stderr, flush=True)
            if options.out:
                write_json(options.out, workload, runs)
    print(report(variants, workload, runs))
    return int(any(run.error for run in runs))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed on CPUs: ours, peers and the machine's limit, in turn.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all variants")
    parser.add_argument("--steps", type=int, default=6, help=f"timed steps per run, after {WARMUP_STEPS} untimed ones")
    parser.add_argument("--cores", type=int, default=2, help="total number of cores, even")
    parser.add_argument("--only", help="variants, by name or first word: ours,plain,'torch pp2'")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for all runs and the environment")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="longest turn")
    names = ("policy", "hidden_size", "intermediate_size", "num_hidden_layers", "sequence_length")
    add_workload(parser, names)  # other sizes are fixed: layouts and ratios depend on them
    return parser.parse_args(arguments)


def select(only: str | None) -> list[Variant]:
    """The variants named, in their usual order."""
    if only is None:
        return list(VARIANTS)
    words = [word.strip() for word in only.split(",")]
    for word in words:
        if not any(word in (c.name, c.name.split()[0]) for c in VARIANTS):
            raise SystemExit(f"--only: no variant {word!r}; there are {', '.join(c.name for c in VARIANTS)}")
    return [c for c in VARIANTS if c.name in words or c.name.split()[0] in words]


# --- runs -------------------------------------------------------------------------------------------------------------


def measure(variant: Variant, workload: Workload, round_index: int, options: argparse.Namespace) -> Run:
    """Runs a variant once; errors are part of the result."""
    started, load = time.perf_counter(), os.getloadavg()[0]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="parallel3d-bench-") as name:
        turn = run_ours if variant.module is None else run_peer
        try:
            results = turn(variant, workload, Path(name), options)
        except RunFailed as error:
            results = {"error": str(error)}
    wall_s = time.perf_counter() - started
    return Run(name=variant.name, round=round_index, wall_s=wall_s, load_before=load, **results)


def run_ours(variant: Variant, workload: Workload, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    config = our_config(variant, workload, folder / "run", options)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    run_processes([[sys.executable, "launch/train.py", "--config", str(path)]], [{}], folder, options.timeout_s)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    return {"tokens_per_s": [step["tokens_per_s"] for step in steps[WARMUP_STEPS:]], "loss": steps[-1]["loss"]}


def our_config(variant: Variant, workload: Workload, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": {
            "vocab_size": workload.vocab_size,
            "hidden_size": workload.hidden_size,
            "intermediate_size": workload.intermediate_size,
            "num_hidden_layers": workload.num_hidden_layers,
            "num_attention_heads": workload.num_attention_heads,
        },
        "parallel": dict(variant.parallel),
        "batch": {
            "global_batch_size": workload.global_batch_size,
            "micro_batch_size": workload.micro_batch_size,
            "sequence_length": workload.sequence_length,
        },
        "precision": {"policy": workload.policy},
        "optimizer": {"learning_rate": 3e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1},
        "lr_schedule": {"kind": "constant"},
        "run": {
            "directory": str(directory),
            "num_steps": WARMUP_STEPS + options.steps,
            "threads_per_rank": options.cores // variant.num_processes,
            "evaluate_batches": 1,
            "device": "cpu",
        },
    }


def run_peer(variant: Variant, workload: Workload, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    threads = options.cores // variant.num_processes
    numbers = ["--steps", str(WARMUP_STEPS + options.steps), "--threads", str(threads)]
    command = [sys.executable, "-m", str(variant.module), *variant.arguments, *workload.arguments(), *numbers]
    environments = peer_environments(variant.num_processes, threads)
    run_processes([command] * variant.num_processes, environments, folder, options.timeout_s)
    words = [line.split(maxsplit=2) for line in (folder / "rank-0.log").read_text().splitlines() if line.strip()]
    steps = [(float(line[1]), float(line[2])) for line in words if line[0] == "STEP"]
    tables = [" ".join(line[1:]) for line in words if line[0] == "GFLOPS"]
    return {
        "tokens_per_s": [workload.tokens_per_step / seconds for seconds, _ in steps[WARMUP_STEPS:]],
        "loss": steps[-1][1],
        "kernel_gflops": json.loads(tables[0]) if tables else None,
    }


def peer_environments(num_processes: int, threads: int) -> list[dict[str, str]]:
    """The environment that torchrun would set for each rank; all ranks are in one process group, to end together."""
    shared = {
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": MALLOC_KEEP_BYTES,
        "MALLOC_TRIM_THRESHOLD_": MALLOC_KEEP_BYTES,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], folder: Path, timeout_s: float
) -> None:
    """Runs the commands together, output in rank-<n>.log; none outlives the call.

    Raises RunFailed if one fails or times out.
    """
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout_s
    try:
        for rank, (command, environment) in enumerate(zip(commands, environments)):
            with open(folder / f"rank-{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **environment},
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        process_group=processes[0].pid if processes else 0,
                    )
                )
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            if time.monotonic() > deadline:
                raise RunFailed(f"not done after {timeout_s:g} s")
            time.sleep(POLL_S)
            codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise RunFailed(f"exit code {code}: {last_error(folder / f'rank-{rank}.log')}")
    finally:
        if processes:
            with suppress(ProcessLookupError):
                os.killpg(processes[0].pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def last_error(log: Path) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no output"])[-1][:300]


# --- results ----------------------------------------------------------------------------------------------------------


def describe(run: Run) -> str:
    return f"{run.name}: {run.error or f'{median(run.tokens_per_s):,.0f} tokens/s'} ({run.wall_s:.0f} s)"


def write_json(path: Path, workload: Workload, runs: Sequence[Run]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {"environment": describe_environment(sys.orig_argv), "workload": asdict(workload)}
    path.write_text(json.dumps(parts | {"runs": [asdict(run) for run in runs]}, indent=1) + "\n")


def report(variants: Sequence[Variant], workload: Workload, runs: Sequence[Run]) -> str:
    """Returns the tables in Markdown."""
    command = shlex.join(sys.orig_argv)
    return "\n\n".join([f"`{command}`", speed_table(variants, workload, runs), kernel_table(runs)]).rstrip() + "\n"


def speed_table(variants: Sequence[Variant], workload: Workload, runs: Sequence[Run]) -> str:
    """A row a variant: median and best of all its timed steps, beside the plain loop and the machine's bound."""
    speeds = {c.name: [s for run in runs if run.name == c.name for s in run.tokens_per_s] for c in variants}
    medians = {name: median(values) for name, values in speeds.items() if values}
    plain = medians.get("plain")
    rows = [
        "| variant | tokens/s, median | best | of plain | of the machine's bound | last loss |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for variant in variants:
        name, turns = variant.name, [run for run in runs if run.name == variant.name]
        if errors := [run.error for run in turns if run.error]:
            rows.append(f"| {name} | {len(errors)} of {len(turns)} runs failed: {cell(errors[-1])} | | | | |")
        if name in medians:
            bound = machine_bound(variant.layout, medians, workload)
            rows.append(
                f"| {name} | {medians[name]:,.0f} | {max(speeds[name]):,.0f} | {ratio(medians[name], plain)} "
                f"| {share(medians[name], bound, variant.goal_in(workload.policy))} | {loss_cell(turns)} |"
            )
    if plain is not None and workload.policy == "fp32":
        rows += [estimate_row(*peer, plain=plain, medians=medians, workload=workload) for peer in ELSEWHERE]
        rows += ["", "\\* not run here: estimated from its ratio to the plain loop on another machine (Intel)"]
    return "\n".join(rows)


def estimate_row(
    name: str, layout: str, low: float, high: float, *, plain: float, medians: Mapping[str, float], workload: Workload
) -> str:
    estimates = [value / PLAIN_TOKENS_PER_S_ELSEWHERE * plain for value in sorted({low, high})]
    speeds = " to ".join(f"{value:,.0f}" for value in estimates)
    shares = " to ".join(ratio(value, machine_bound(layout, medians, workload)) for value in estimates)
    return f"| {name} \\* | {speeds} | | {' to '.join(ratio(value, plain) for value in estimates)} | {shares} | |"


def machine_bound(layout: str, medians: Mapping[str, float], workload: Workload) -> float | None:
    """Tokens/s of the model's products and attention alone; a pipeline idles (p - 1) / (m + p - 1) of the time."""
    if layout != "pp2":
        return medians.get(f"machine {layout}")
    bubble = 1 / (workload.num_micro_batches + 1)  # of two stages in order, 1F1B
    whole = medians.get("machine dp2")
    return None if whole is None else whole * (1 - bubble)


def share(speed: float, bound: float | None, goal: float | None) -> str:
    if bound is None or goal is None:
        return ratio(speed, bound)
    return f"{ratio(speed, bound)} ({'at least' if speed / bound >= goal else 'below'} {goal:.2f})"


def ratio(value: float, base: float | None) -> str:
    return "-" if base is None else f"{value / base:.2f}"


def loss_cell(turns: Sequence[Run]) -> str:
    losses = [run.loss for run in turns if math.isfinite(run.loss)]
    return f"{losses[-1]:.2f}" if losses else ""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def kernel_table(runs: Sequence[Run]) -> str:
    """Returns the GFLOP/s of each kernel and implementation, with a column for each layout of the machine's runs."""
    last = {run.name: run.kernel_gflops for run in runs if run.kernel_gflops}
    if not last:
        return ""
    rows = [
        "| GFLOP/s of a process: torch.mm / ours / bf16 widened / the head cut / by tiles | " + " | ".join(last) + " |",
        "|---" + "|--:" * len(last) + "|",
    ]
    for kernel in next(iter(last.values())):
        cells = [" / ".join(f"{value:,.0f}" for value in table[kernel].values()) for table in last.values()]
        rows.append(f"| {kernel} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
