"""Runs that lose a worker and get another one, on real processes: every pair of how they were started, how the worker
returns, who was lost and when.

    launcher   plain, torchrun, deepspeed, or a process on each of several hosts (network namespaces)
    way        rejoin: its guardian starts another; spare: one waited; join: a command in another shell starts one;
               growth: a spare widens the stage, and the lost worker's place is taken again
    victim     the leader, or the last worker
    moment     a step, an evaluation, a save; takeover: the coordinator is killed as well, while the newcomer starts

Each run goes on until every place is taken, and is then stopped as by Ctrl-C. Sums are exact, so its losses must be
those of one process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support import dawdling_training
from tests.support.launch_runs import finish, metrics, start
from tests.support.member_processes import free_port
from tests.support.network_hosts import Network, network_of
from tests.support.struck_worlds import ROOT, StruckWorld, has_own_traceback, parent_of
from tests.support.tiers import covering_rows, spread_rows

LAUNCHERS = ("plain", "torchrun", "deepspeed", "hosts")
WAYS = ("rejoin", "spare", "join", "growth")
VICTIMS = ("leader", "last")
MOMENTS = {"step": "never", "evaluation": "evaluate", "save": "save", "takeover": "never"}
"""The phase in which rank 1 waits until the victim is struck."""
BIN = Path(sys.executable).parent
NUM_CELLS = 24
STRIKE_STEP = 8
"""An evaluation and a save follow it."""
STEPS_AFTER = 3
GROWN = 3
"""Replicas of a stage that has grown from two."""
CONTROL_S = 6.0
MASTER_PORT = 29500
TRACES = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|OMPI_|PMI_|PMIX_|TORCHELASTIC_")
StartCommand = Callable[[list[str], int], "subprocess.Popen[str]"]
"""Starts a command on the host with this number, from 0 on."""


@dataclass(frozen=True)
class ReturnCell:
    """One run."""

    launcher: str
    way: str
    victim: str
    moment: str

    @property
    def name(self) -> str:
        return "-".join(asdict(self).values())

    @property
    def num_stages(self) -> int:
        return 2 if self.launcher == "plain" else 1

    @property
    def num_spares(self) -> int:
        return {"spare": 1, "growth": self.num_stages}.get(self.way, 0)

    @property
    def num_workers(self) -> int:
        """Those with which it begins."""
        return 2 * self.num_stages + self.num_spares

    @property
    def struck_rank(self) -> int:
        return 0 if self.victim == "leader" else 2 * self.num_stages - 1

    @property
    def widths(self) -> list[int]:
        """The replicas of each stage in the end."""
        return [GROWN if self.way == "growth" else 2] * self.num_stages


def return_cells() -> list[ReturnCell]:
    """Every pair of values, and some more."""
    every = [ReturnCell(*values) for values in itertools.product(LAUNCHERS, WAYS, VICTIMS, MOMENTS)]
    covering = set(covering_rows([asdict(cell) for cell in every]))
    others = [number for number in range(len(every)) if number not in covering]
    more = {others[number] for number in spread_rows(len(others), max(0, NUM_CELLS - len(covering)))}
    return [every[number] for number in sorted(covering | more)]


def run_return_cell(
    cell: ReturnCell, directory: Path, text: Path, undisturbed: Callable[[int], list[float]]
) -> list[str]:
    """Runs a cell; returns what is wrong. `undisturbed` has the losses of one process of at least so many steps."""
    (directory / "config.json").write_text(json.dumps(config_of(cell, directory / "run", text)))
    with contextlib.ExitStack() as stack:
        run = ReturnRun(cell, directory, stack.enter_context(network_of(3)) if cell.launcher == "hosts" else None)
        stack.callback(run.world.kill)
        run.strike()
        run.await_whole()
        codes, outputs = run.stop()
        return find_faults(cell, run.world, codes, outputs, undisturbed)


class ReturnRun:
    """The processes of a cell, from their start on."""

    def __init__(self, cell: ReturnCell, directory: Path, network: Network | None):
        self._cell = cell
        self._network = network
        self._folder = directory / "run"
        self._num_changes = 0
        """Before the strike."""
        self.world = StruckWorld(list(self._start_all(directory)), directory)

    def strike(self) -> None:
        """Kills the victim at its moment, and the coordinator too, if it is to be lost; has another worker join."""
        cell, world = self._cell, self.world
        if MOMENTS[cell.moment] == "never":
            self._await(lambda: self._num_steps() >= STRIKE_STEP, f"step {STRIKE_STEP}")
            self._await(lambda: cell.way != "growth" or self._is_whole(since=0), "the growth")
        else:
            world.await_files(["dawdling-1"])
        self._num_changes = len(self._changes())
        world.strike(self._pid_of(f"rank-{cell.struck_rank}"), "KILL")
        if cell.way == "join":
            command = self._script("never", "--join", config=self._folder / "config.json")
            self.world = StruckWorld([*world.processes, self._popen([sys.executable, *command], 2)], world.directory)
        if cell.moment == "takeover":
            newcomer = self._folder / "logs" / f"rank-{cell.num_workers}.log"
            self._await(lambda: cell.way == "spare" or newcomer.exists(), "the newcomer")
            os.kill(self._pid_of("coordinator"), signal.SIGKILL)

    def await_whole(self) -> None:
        """Waits until every place is taken again, and for some steps more."""
        self._await(lambda: self._is_whole(since=self._num_changes), f"widths of {self._cell.widths}")
        num_steps = self._num_steps() + STEPS_AFTER
        self._await(lambda: self._num_steps() >= num_steps, f"step {num_steps}")

    def _is_whole(self, *, since: int) -> bool:
        """Whether a change after the first `since` ones has filled the last place."""
        return any(change["widths"] == self._cell.widths for change in self._changes()[since:][-1:])

    def stop(self) -> tuple[list[int], list[str]]:
        """Stops the run as Ctrl-C at one of its processes does; returns all exit codes and outputs."""
        os.kill(parent_of(self._pid_of("guardian")), signal.SIGINT)
        outputs = self.world.end(None)
        return [process.returncode for process in self.world.processes], outputs

    def _await(self, is_met: Callable[[], object], what: str) -> None:
        self.world.await_condition(is_met, what)

    def _changes(self) -> list[dict[str, Any]]:
        return [line for line in self._lines() if line.get("event") == "membership"]

    def _num_steps(self) -> int:
        return sum("event" not in line for line in self._lines())

    def _lines(self) -> list[dict[str, Any]]:
        path = self._folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def _pid_of(self, role: str) -> int:
        """A process of the run with this role, once there is one."""
        found: list[int] = []

        def find() -> list[int]:
            found[:] = [pid for pid, name in self.world.pids().items() if name == f"p3d-{role}"]
            return found

        self._await(find, role)
        return min(found)

    # --- how it is started --------------------------------------------------------------------------------------------

    def _start_all(self, directory: Path) -> Iterator[subprocess.Popen[str]]:
        cell = self._cell
        script = self._script(MOMENTS[cell.moment], config=directory / "config.json")
        if cell.launcher == "hosts":
            for rank in range(cell.num_workers):
                yield self._popen([sys.executable, *script], rank, **self._variables(rank))
            return
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", f"{cell.num_workers}"]
        deepspeed = [f"{BIN / 'deepspeed'}", "--num_gpus", f"{cell.num_workers}"]
        deepspeed += ["--no_local_rank", "--master_port", f"{free_port()}"]
        launcher = {"torchrun": torchrun, "deepspeed": deepspeed}.get(cell.launcher, [])
        yield self._popen([sys.executable, *launcher, *script], 0, DS_ACCELERATOR="cpu")

    def _script(self, phase: str, *more: str, config: Path) -> list[str]:
        folder = str(self._folder.parent)
        return [dawdling_training.__file__, folder, phase, f"{STRIKE_STEP}", "-", "--config", f"{config}", *more]

    def _popen(self, command: list[str], host: int, **variables: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not TRACES.match(name)}
        environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        if self._network:
            return self._network.hosts[host].popen(command, env=environment)
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def _variables(self, rank: int) -> dict[str, str]:
        """What a launcher without a store of its own sets."""
        assert self._network is not None
        world = {"RANK": rank, "WORLD_SIZE": self._cell.num_workers, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        address = {"MASTER_ADDR": self._network.hosts[0].address, "MASTER_PORT": f"{MASTER_PORT}"}
        return {**{name: f"{value}" for name, value in world.items()}, **address}


def config_of(cell: ReturnCell, folder: Path, text: Path) -> dict[str, Any]:
    model = dict(vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    elastic = {"control_timeout_s": CONTROL_S, "spares": cell.num_spares}
    elastic["max_rejoins"] = 3 if cell.way in ("rejoin", "growth") else 0
    return {
        "model": model,
        "parallel": {"pp_size": cell.num_stages, "dp_size": 2},
        "precision": {"sums": "exact"},
        "batch": {"global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-2},
        "lr_schedule": {"kind": "constant"},
        "data": {"sources": [str(text)], "cache_directory": str(text.parent / "cache")},
        "monitor": {"charts": False},
        "elastic": {**elastic, **({"max_replicas": GROWN} if cell.way == "growth" else {})},
        "checkpoint": {"every": STRIKE_STEP, "keep_last": 2, "save_at_end": False},
        "run": {
            "num_steps": 1000000,
            "threads_per_rank": 1,
            "evaluate_every": STRIKE_STEP,
            "evaluate_batches": 1,
            "directory": str(folder),
        },
    }


def train_undisturbed(directory: Path, text: Path, num_steps: int) -> list[float]:
    """Returns the losses of one process."""
    cell = ReturnCell("torchrun", "join", "last", "step")
    file = directory / f"undisturbed-{num_steps}.json"
    file.write_text(json.dumps(config_of(cell, directory / file.stem, text)))
    code, out, err = finish(start("--config", file, "parallel.dp_size=1", f"run.num_steps={num_steps}"))
    assert code == 0, out + err
    return [line["loss"] for line in metrics(directory / file.stem)]


def find_faults(
    cell: ReturnCell,
    world: StruckWorld,
    codes: list[int],
    outputs: list[str],
    undisturbed: Callable[[int], list[float]],
) -> list[str]:
    lines = metrics(world.directory / "run")
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    stopped = 128 + signal.SIGINT
    is_stopped = all(codes) if cell.launcher in ("torchrun", "deepspeed") else set(codes) == {stopped}
    return [
        *([f"exit codes {codes}"] if not is_stopped else []),
        *([f"left behind: {left}"] if (left := world.left_behind()) else []),
        *(text for text in (*outputs, *world.logs()) if has_own_traceback(text)),
        *([f"steps {steps}"] if steps != list(range(1, len(steps) + 1)) else []),
        *(["other losses"] if losses != undisturbed(len(losses))[: len(losses)] else []),
    ]
