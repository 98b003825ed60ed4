"""The cells of the signal matrix that need real training: the launcher, and every process below it, struck while rank 1
begins an evaluation or a save (dawdling_training.py).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import CheckpointDirectory, verify_resumable
from parallel3d.errors import CheckpointError
from tests.support import dawdling_training
from tests.support.launch_runs import metrics
from tests.support.struck_worlds import ROOT, StruckWorld, has_own_traceback, parent_of

NUM_STEPS = 80
STRIKE_STEP = 16
"""Both an evaluation and a save follow it."""
LOSS_TOLERANCE = 1e-5
"""fp32 sums in another order after a loss."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
CONTROL_S = 6.0


@dataclass(frozen=True)
class TrainingCell:
    """One run on two ranks. `process` is `launcher` for the one that was started; below it there is rank 1's stub,
    under torchrun, and its guardian and worker, and rank 0's coordinator."""

    has_torchrun: bool
    process: str
    what: str
    phase: str

    @property
    def name(self) -> str:
        launcher = "torchrun" if self.has_torchrun else "alone"
        return f"{launcher}-{self.process}-{self.what}-{self.phase}".replace(" ", "-")


UNDISTURBED = TrainingCell(False, "launcher", "CONT 0.3", "never")


def training_cells(has_torchrun: bool) -> list[TrainingCell]:
    """All cells of a launcher; moments, which are rarely more than a delay, and evaluations under torchrun for some."""
    phases = ("save",) if has_torchrun else ("evaluate", "save")
    processes = ("launcher", *(("stub",) if has_torchrun else ()), "guardian", "coordinator", "worker")
    lost = [TrainingCell(has_torchrun, *rest) for rest in itertools.product(processes, ("STOP", "KILL"), phases)]
    moments = ("stub",) if has_torchrun else processes
    evaluations = (("launcher", "KILL"), ("guardian", "STOP"), ("coordinator", "KILL")) if has_torchrun else ()
    lost += [TrainingCell(has_torchrun, process, what, "evaluate") for process, what in evaluations]
    return [*lost, *(TrainingCell(has_torchrun, process, "CONT 3", "save") for process in moments)]


def expected_code(cell: TrainingCell) -> int:
    """The exit code of the launcher."""
    is_lost = cell.what in ("STOP", "KILL")
    if cell.process == "launcher" and cell.what == "KILL":
        return -signal.SIGKILL
    if cell.process == "stub" and cell.what == "KILL":
        return 1  # torchrun ends all others
    if cell.process == "guardian" and is_lost and not cell.has_torchrun:
        return 3  # it had all workers
    return 0


def run_training_cell(cell: TrainingCell, directory: Path, text: Path, undisturbed: list[float]) -> str:
    """Runs a cell; returns what is wrong with its end, "" if nothing is."""
    directory.mkdir()
    world = StruckWorld([start_training(cell, directory, text)], directory)
    try:
        world.await_files(["dawdling-1"])
        pid = _pid_of(cell, world)
        world.strike(pid, cell.what)
        outputs = world.end(pid if cell.process in ("launcher", "stub") and cell.what == "STOP" else None)
        wrong = _wrong(cell, world, outputs, undisturbed)
    except AssertionError as error:
        return f"{cell.name}: {error}"
    finally:
        world.kill()
    return "\n".join([f"{cell.name}: {wrong[0]}", *wrong[1:], *outputs]) if wrong else ""


def start_training(cell: TrainingCell, directory: Path, text: Path) -> subprocess.Popen[str]:
    """Starts a small run in `directory`, its output piped."""
    config = directory / "config.json"
    config.write_text(json.dumps(_config(directory, text)))
    script = [dawdling_training.__file__, str(directory), cell.phase, str(STRIKE_STEP), "--config", str(config)]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [sys.executable, *(TORCHRUN if cell.has_torchrun else ()), *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _config(directory: Path, text: Path) -> dict[str, Any]:
    model = dict(vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return {
        "model": model,
        "parallel": {"pp_size": 1, "dp_size": 2},
        "batch": {"global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-2},
        "data": {"sources": [str(text)], "cache_directory": str(text.parent / "cache")},
        "monitor": {"charts": False},
        "elastic": {
            "control_timeout_s": CONTROL_S,
            "heartbeat_timeout": {"min_s": 1.0, "max_s": 1.0},  # ten times as long in these phases
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
    started = world.processes[0].pid
    if cell.process == "launcher":
        return started
    workers = {name: pid for pid, name in world.pids().items()}
    if cell.process == "coordinator":
        return workers["p3d-coordinator"]
    worker = workers["p3d-rank-1"]
    guardian = parent_of(worker)
    return {"worker": worker, "guardian": guardian, "stub": parent_of(guardian)}[cell.process]


def _wrong(cell: TrainingCell, world: StruckWorld, outputs: list[str], undisturbed: list[float]) -> list[str]:
    code, expected, run = world.processes[0].returncode, expected_code(cell), world.directory / "run"
    lines = metrics(run)
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    return [
        *([f"exit code {code}, not {expected}"] if code != expected else []),
        *([f"left behind: {left}"] if (left := world.left_behind()) else []),
        *(text for text in (*outputs, *world.logs()) if has_own_traceback(text)),
        *([f"steps {steps}"] if steps != list(range(1, len(steps) + 1)) else []),
        *(["other losses"] if not _are_close(losses, undisturbed) else []),
        *(["it ended before its last step"] if expected == 0 and len(steps) != NUM_STEPS else []),
        *_damaged(run / "checkpoints"),
    ]


def _are_close(losses: list[float], undisturbed: list[float]) -> bool:
    return all(abs(ours - theirs) <= LOSS_TOLERANCE * theirs for ours, theirs in zip(losses, undisturbed))


def _damaged(directory: Path) -> list[str]:
    """What is wrong with any published checkpoint, every byte of which is read."""
    checkpoints, found = CheckpointDirectory(directory), []
    for step in checkpoints.steps():
        try:
            verify_resumable(checkpoints.path_of(step))
        except CheckpointError as error:
            found.append(str(error))
    return found
