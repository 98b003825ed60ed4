"""The variants of one training run that benchmarks compare, and how each is started.

Every variant trains the same model on the same number of cores: one process with all of them, or two with half each.
The machine's limits (peers/machine*.py) are among them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import Workload
from parallel3d.monitor.run_folder import METRICS, read_metrics

ROOT = Path(__file__).resolve().parent.parent
WARMUP_STEPS = 2  # memory is touched and kernels are built for the first time
POLL_S = 0.2
MALLOC_KEEP_BYTES = str(2**30)
"""Keeps freed memory in the process: activations cause no page faults. Ours sets it itself; peers get it, too."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train the workload. `module` is a peer's script, none means launch/train.py of `tree`."""

    name: str
    layout: str
    module: str | None = None
    arguments: tuple[str, ...] = ()
    parallel: Mapping[str, Any] = field(default_factory=dict)
    goal: float | None = None
    bf16_goal: float | None = None
    tree: Path = ROOT

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
    error: str | None = None
    wall_s: float | None = None
    load_before: float | None = None
    beside: str = ""
    """The layout of those that it took turns with; empty where it ran alone, and the two above are known."""


PEERS = "benchmarks.peers."
TORCH, DEEPSPEED, HF = PEERS + "torch_parallel", PEERS + "deepspeed", PEERS + "huggingface"
EXCHANGES, WHOLE_STEP = PEERS + "machine_with_exchanges", PEERS + "machine_whole_step"

VARIANTS: tuple[Variant, ...] = (
    *(
        Variant(name=f"{module} {kind}", layout=kind, module=PEERS + module, arguments=(kind,))
        for module in ("machine", "machine_in_order", "machine_with_memory")
        for kind in ("single", "dp2", "tp2")
    ),
    *(
        Variant(name=f"machine_with_exchanges {kind}", layout="tp2", module=EXCHANGES, arguments=(kind,))
        for kind in ("tp2", "tp2+sp")
    ),
    *(
        Variant(name=f"machine_whole_step {kind}", layout=layout, module=WHOLE_STEP, arguments=(kind,))
        for kind, layout in (("single", "single"), ("tp2", "tp2"), ("tp2+sp", "tp2"))
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
    num_steps = WARMUP_STEPS + options.steps
    command = our_command(variant, workload, folder, options, num_steps)
    run_processes([command], [our_environment(variant)], folder, options.timeout_s)
    steps = our_steps(folder)
    return {"tokens_per_s": [step["tokens_per_s"] for step in steps[WARMUP_STEPS:]], "loss": steps[-1]["loss"]}


def our_command(
    variant: Variant, workload: Workload, folder: Path, options: argparse.Namespace, num_steps: int
) -> list[str]:
    """The command that trains in `folder`, whose configuration is written."""
    path = folder / "config.json"
    path.write_text(json.dumps(our_config(variant, workload, folder / "run", options.cores, num_steps)))
    return [sys.executable, str(variant.tree / "launch/train.py"), "--config", str(path)]


def our_environment(variant: Variant) -> dict[str, str]:
    return {"PYTHONPATH": str(variant.tree)}


def our_steps(folder: Path) -> list[dict[str, Any]]:
    """The records of all steps so far of a run of ours."""
    path = folder / "run" / METRICS
    return [line for line in read_metrics(path) if "event" not in line] if path.exists() else []


def our_config(
    variant: Variant, workload: Workload, directory: Path, num_cores: int, num_steps: int
) -> dict[str, Any]:
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
            "num_steps": num_steps,
            "threads_per_rank": num_cores // variant.num_processes,
            "evaluate_batches": 1,
            "device": "cpu",
        },
    }


def run_peer(variant: Variant, workload: Workload, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    commands, environments = peer_commands(variant, workload, options.cores, WARMUP_STEPS + options.steps)
    run_processes(commands, environments, folder, options.timeout_s)
    steps = peer_steps(folder)
    return {
        "tokens_per_s": [workload.tokens_per_step / seconds for seconds, _ in steps[WARMUP_STEPS:]],
        "loss": steps[-1][1],
        "kernel_gflops": kernel_gflops(folder),
    }


def peer_commands(
    variant: Variant, workload: Workload, num_cores: int, num_steps: int
) -> tuple[list[list[str]], list[dict[str, str]]]:
    """The command of each process of a peer's script, and what its environment has besides."""
    threads = num_cores // variant.num_processes
    numbers = ["--steps", str(num_steps), "--threads", str(threads)]
    command = [sys.executable, "-m", str(variant.module), *variant.arguments, *workload.arguments(), *numbers]
    return [command] * variant.num_processes, peer_environments(variant.num_processes, threads)


def peer_steps(folder: Path, rank: int = 0) -> list[tuple[float, float]]:
    """Seconds and loss of the steps that a process of a peer's script has printed so far."""
    return [(float(words[1]), float(words[2])) for words in _printed(folder, rank) if words[0] == "STEP"]


def kernel_gflops(folder: Path) -> dict[str, dict[str, float]] | None:
    tables = [" ".join(words[1:]) for words in _printed(folder, 0) if words[0] == "GFLOPS"]
    return json.loads(tables[-1]) if tables else None


def _printed(folder: Path, rank: int) -> list[list[str]]:
    whole_lines = (folder / f"rank-{rank}.log").read_text(errors="replace").rpartition("\n")[0].splitlines()
    return [line.split(maxsplit=2) for line in whole_lines if line.strip()]


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
        for process in start_processes(commands, environments, folder):
            processes.append(process)
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            if time.monotonic() > deadline:
                raise RunFailed(f"not done after {timeout_s:g} s")
            time.sleep(POLL_S)
            codes = [process.poll() for process in processes]
        raise_if_failed(codes, folder)
    finally:
        end_processes(processes)


def start_processes(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts one after the other, in one process group; output in rank-<n>.log."""
    group = 0
    for rank, (command, environment) in enumerate(zip(commands, environments)):
        with open(folder / f"rank-{rank}.log", "wb") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=group,
            )
        group = group or process.pid
        yield process


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills all that `start_processes` has started and their children."""
    if processes:
        with suppress(ProcessLookupError):
            os.killpg(processes[0].pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def raise_if_failed(codes: Sequence[int | None], folder: Path) -> None:
    for rank, code in enumerate(codes):
        if code:
            raise RunFailed(f"exit code {code}: {last_error(folder / f'rank-{rank}.log')}")


def last_error(log: Path) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no output"])[-1][:300]
