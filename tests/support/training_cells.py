"""The cells of the signal matrix that need real training: the launchers, and every process below them, struck while
rank 1 begins an evaluation or a save, or is in a recovery whose new groups have just been made (dawdling_training.py).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import CheckpointDirectory, verify_resumable
from parallel3d.errors import CheckpointError
from tests.support import dawdling_training
from tests.support.launch_runs import metrics
from tests.support.member_processes import free_port
from tests.support.strike_clock import StrikeClock
from tests.support.struck_worlds import MOMENTS_S, ROOT, StruckWorld, has_own_traceback, parent_of, started_world

NUM_STEPS = 80
STRIKE_STEP = 16
"""Both an evaluation and a save follow it, and the loss of the last rank comes soon after it."""
GROUPS = "recovery_groups"
"""Rank 1 has the commit and the new groups; the other survivor waits for it in the first exchange over them."""
PHASES = ("evaluate", "save", GROUPS)
TORCHRUN = ("-m", "torch.distributed.run")
HOSTS = "abc"
CONTROL_S = 6.0
HEARTBEAT_S = 1.0


@dataclass(frozen=True)
class TrainingCell:
    """One run: two ranks on one host, or one on each of three; with GROUPS one more on the one host, and the last one
    is killed.

    `launcher` is a process that was started. The stubs are that, too, where there is no torchrun above them.
    """

    has_torchrun: bool
    process: str
    what: str
    phase: str
    hosts: int = 1
    host: int = 0

    @property
    def name(self) -> str:
        launcher = "torchrun" if self.has_torchrun else "alone"
        place = [] if self.hosts == 1 else [f"{self.host}-of-{self.hosts}"]
        return "-".join([launcher, *place, self.process, self.what, self.phase]).replace(" ", "-")

    @property
    def struck_rank(self) -> int:
        """The rank whose processes are struck: on one host the last, which does not lead."""
        return 0 if self.process == "coordinator" else self.host if self.hosts > 1 else 1

    @property
    def is_killed_stub(self) -> bool:
        return self.what == "KILL" and self.process == ("stub" if self.has_torchrun else "launcher")

    @property
    def num_ranks(self) -> int:
        return max(self.hosts, 3 if self.phase == GROUPS else 2)

    @property
    def ends_all(self) -> bool:
        """Whether the first of three hosts is lost when the last one is out of the run: the second is half of two."""
        is_above = self.process in ("launcher", "stub") and self.what == "KILL"
        return is_above and (self.hosts, self.host, self.phase) == (3, 0, GROUPS)

    @property
    def is_torchrun_without_end(self) -> bool:
        """As in SignalCell."""
        is_above = self.process in ("launcher", "stub")
        return self.has_torchrun and is_above and self.what == "KILL" and self.host > 0


UNDISTURBED = TrainingCell(False, "launcher", "CONT 0.3", "never")


def training_cells(has_torchrun: bool) -> list[TrainingCell]:
    """On one host all cells without torchrun but moments, which are rarely more than a delay; with it, some. Some of
    those with new groups."""
    phases = ("save",) if has_torchrun else ("evaluate", "save")
    processes = _processes(has_torchrun)
    lost = [TrainingCell(has_torchrun, *rest) for rest in itertools.product(processes, ("STOP", "KILL"), phases)]
    moments = ("stub",) if has_torchrun else processes
    evaluations = (("launcher", "KILL"), ("guardian", "STOP"), ("coordinator", "KILL")) if has_torchrun else ()
    lost += [TrainingCell(has_torchrun, process, what, "evaluate") for process, what in evaluations]
    grouped = (("worker", "STOP"), ("coordinator", "KILL"))
    lost += [TrainingCell(has_torchrun, process, what, GROUPS) for process, what in grouped]
    return [*lost, *(TrainingCell(has_torchrun, process, "CONT 3", "save") for process in moments)]


def all_training_cells() -> list[TrainingCell]:
    """Every process, on one host, and on the first and the second of three, in each phase."""
    return [
        TrainingCell(has_torchrun, process, what, phase, hosts, host)
        for has_torchrun, (hosts, host) in itertools.product((False, True), [(1, 0), (3, 0), (3, 1)])
        for process in _processes(has_torchrun)
        if host == 0 or process != "coordinator"
        for what, phase in itertools.product(MOMENTS_S, PHASES)
    ]


def _processes(has_torchrun: bool) -> tuple[str, ...]:
    return ("launcher", *(("stub",) if has_torchrun else ()), "guardian", "coordinator", "worker")


def expected_codes(cell: TrainingCell) -> list[int]:
    """The exit code of each process that was started."""
    codes = [-signal.SIGKILL if cell.is_torchrun_without_end else 0] * cell.hosts
    if cell.ends_all:
        codes = [1 if cell.has_torchrun else 4] * cell.hosts
    if cell.what == "KILL" and cell.process == "launcher":
        codes[cell.host] = -signal.SIGKILL
    if cell.what == "KILL" and cell.process == "stub":
        codes[cell.host] = 1  # torchrun ends all others of this host
    if cell.what in ("STOP", "KILL") and cell.process == "guardian" and cell.hosts == 1 and not cell.has_torchrun:
        codes = [3]  # it had all workers
    return codes


def run_training_cell(cell: TrainingCell, directory: Path, text: Path, undisturbed: list[float]) -> str:
    """Runs a cell; returns what is wrong with its end, "" if nothing is."""
    directory.mkdir()
    try:
        with started_world(partial(start_training, cell, directory, text), directory, ["dawdling-1"]) as world:
            pid = _pid_of(cell, world)
            clock = StrikeClock(world, pid)
            world.strike(pid, cell.what)
            is_above = cell.process == "launcher" and cell.has_torchrun
            if cell.is_torchrun_without_end or (is_above and cell.hosts > 1):
                world.await_end_below()
            if is_above and cell.what == "STOP" and cell.hosts > 1:
                os.kill(pid, signal.SIGCONT)  # the others wait for it
            if cell.is_torchrun_without_end:
                world.kill_started(once_ended=cell.host)
            is_continued = is_above and cell.hosts > 1
            is_stopped = cell.process in ("launcher", "stub") and cell.what == "STOP" and not is_continued
            outputs = world.end(pid if is_stopped else None)
            wrong = _wrong(cell, world, outputs, undisturbed)
            clock.write(directory)
    except AssertionError as error:
        return f"{cell.name}: {error}"
    return "\n".join([f"{cell.name}: {wrong[0]}", *wrong[1:], *outputs]) if wrong else ""


def start_training(cell: TrainingCell, directory: Path, text: Path) -> list[subprocess.Popen[str]]:
    """Starts a small run in `directory`, the outputs piped."""
    config = directory / "config.json"
    config.write_text(json.dumps(_config(cell, directory, text)))
    hosts = HOSTS if cell.hosts > 1 else "-"
    script = [dawdling_training.__file__, str(directory), cell.phase, str(STRIKE_STEP), hosts, "--config", str(config)]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, *(_torchrun(cell, host, port) if cell.has_torchrun else ()), *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**kept, **_variables(cell, host, port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        for host in range(cell.hosts)
    ]


def _torchrun(cell: TrainingCell, host: int, port: str) -> list[str]:
    if cell.hosts == 1:
        return [*TORCHRUN, "--standalone", "--nproc_per_node", str(cell.num_ranks)]
    place = {"nproc_per_node": 1, "nnodes": cell.hosts, "node_rank": host, "master_addr": "127.0.0.1"}
    return [*TORCHRUN, *(f"--{name}={value}" for name, value in {**place, "master_port": port}.items())]


def _variables(cell: TrainingCell, host: int, port: str) -> dict[str, str]:
    """What a launcher without a store of its own sets."""
    if cell.hosts == 1 or cell.has_torchrun:
        return {}
    world = {"RANK": host, "WORLD_SIZE": cell.hosts, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}


def _config(cell: TrainingCell, directory: Path, text: Path) -> dict[str, Any]:
    model = dict(vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return {
        "model": model,
        "parallel": {"pp_size": 1, "dp_size": cell.num_ranks},
        "batch": {"global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-2},
        "precision": {"sums": "exact"},  # a loss of workers changes no bit of the losses
        "data": {"sources": [str(text)], "cache_directory": str(text.parent / "cache")},
        "monitor": {"charts": False},
        "elastic": {
            "control_timeout_s": CONTROL_S,
            "max_rejoins": 0,
            "faults": [{"rank": cell.num_ranks - 1, "step": STRIKE_STEP + 4}] if cell.phase == GROUPS else [],
            "heartbeat_timeout": {"min_s": HEARTBEAT_S, "max_s": HEARTBEAT_S},
        },
        "checkpoint": {"every": STRIKE_STEP, "keep_last": 99, "save_at_end": True},
        "run": {
            "num_steps": NUM_STEPS,
            "threads_per_rank": 1,
            "evaluate_every": STRIKE_STEP,
            "evaluate_batches": 1,
            "directory": str(directory / "run"),
        },
    }


def _pid_of(cell: TrainingCell, world: StruckWorld) -> int:
    if cell.process == "launcher":
        return world.processes[cell.host].pid
    workers = {name: pid for pid, name in world.pids().items()}
    if cell.process == "coordinator":
        return workers["p3d-coordinator"]
    worker = workers[f"p3d-rank-{cell.struck_rank}"]
    guardian = parent_of(worker)
    return {"worker": worker, "guardian": guardian, "stub": parent_of(guardian)}[cell.process]


def _wrong(cell: TrainingCell, world: StruckWorld, outputs: list[str], undisturbed: list[float]) -> list[str]:
    codes, expected, run = [p.returncode for p in world.processes], expected_codes(cell), world.directory / "run"
    lines = metrics(run)
    is_ended = cell.ends_all or (cell.hosts == 1 and (cell.is_killed_stub or 0 not in expected))
    must_finish = 3 not in expected and not is_ended
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    return [
        *([f"exit codes {codes}, not {expected}"] if codes != expected else []),
        *([f"left behind: {left}"] if (left := world.left_behind()) else []),
        *(text for text in (*outputs, *world.logs()) if has_own_traceback(text)),
        *([f"steps {steps}"] if steps != list(range(1, len(steps) + 1)) else []),
        *(["other losses"] if losses != undisturbed[: len(losses)] else []),
        *(["it ended before its last step"] if must_finish and len(steps) != NUM_STEPS else []),
        *_damaged(run / "checkpoints"),
    ]


def _damaged(directory: Path) -> list[str]:
    """What is wrong with any published checkpoint, every byte of which is read."""
    checkpoints, found = CheckpointDirectory(directory), []
    for step in checkpoints.steps():
        try:
            verify_resumable(checkpoints.path_of(step))
        except CheckpointError as error:
            found.append(str(error))
    return found
