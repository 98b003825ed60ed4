"""The run that soak.py strikes: a launcher's six processes, what runs below them, and what they have written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak_report import Sample, Size

ROOT = Path(__file__).resolve().parent.parent
PP_SIZE, DP_SIZE = 2, 3
OUTPUT = "output.txt"
FLAGS = (
    *("model.vocab_size=1024", "model.hidden_size=64", "model.intermediate_size=192", "model.num_attention_heads=4"),
    *("batch.sequence_length=32", "batch.micro_batch_size=1", "batch.global_batch_size=12"),
    *("lr_schedule.kind=constant", "precision.sums=exact", "monitor.charts=false"),
    *("run.evaluate_every=200", "run.evaluate_batches=1", "checkpoint.keep_last=2"),
)
UNDER_FIRE = (
    *(f"parallel.pp_size={PP_SIZE}", f"parallel.dp_size={DP_SIZE}", "run.num_steps=100000000"),
    *("elastic.max_rejoins=100000", "elastic.control_timeout_s=8", "checkpoint.every=100"),
)
STUB_STOPPED_S = 15.0
REFUSED = 2
"""Exit code of a process that can't join, for instance as no coordinator serves at this moment."""
MAX_REFUSED = 100
NOTICED_S = 40.0
"""Within it every loss is noticed and written, if a coordinator serves."""
COORDINATES = re.compile(r"pp(\d+)")
JOINS = re.compile(r"rank (\d+) \(pp(\d+) dp\d+ tp\d+\) joins")
"""In the terminal's line of a change, which comes before its record."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of the run."""

    pid: int
    role: str
    """stub, coordinator, guardian or rank."""
    rank: int | None
    """The worker's number; a guardian's and a stub's is that of its worker."""
    is_running: bool
    """Not stopped, and not a zombie."""


class ShotRun:
    """One training run, and what can be seen of it from outside."""

    def __init__(self, folder: Path, flags: list[str]):
        self.folder = folder / "run"
        self.folder.mkdir(parents=True)
        self._grid = {rank: rank // DP_SIZE for rank in range(PP_SIZE * DP_SIZE)}
        """The stages of the workers in the grid, as far as the run has reported them."""
        self._victims: dict[int, float] = {}
        """When each was struck."""
        self._lines: list[dict[str, Any]] = []
        self._offset = 0
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._output = open(folder / OUTPUT, "w")  # noqa: SIM115 (closed in end)
        self._stubs = [self._start(rank, port, flags) for rank in self._grid]
        self._stopped_stubs: dict[int, float] = {}
        """When each goes on, by its process."""
        self._joined: set[int] = set()
        """The processes that have joined in place of killed stubs."""
        self.num_refused = 0
        """Those that ended before the run had taken them in, and were started again."""

    def _start(self, rank: int, port: int, flags: list[str]) -> subprocess.Popen[bytes]:
        size = PP_SIZE * DP_SIZE
        ranks = dict(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
        environment = {**{name: str(value) for name, value in ranks.items()}, "MASTER_ADDR": "127.0.0.1"}
        return subprocess.Popen(
            [*train_command(self.folder, flags), *UNDER_FIRE],
            cwd=ROOT,
            env={**os.environ, **environment, "MASTER_PORT": str(port)},
            stdout=self._output,
            stderr=self._output,
        )

    def _join(self) -> subprocess.Popen[bytes]:
        stub = subprocess.Popen(
            [sys.executable, "launch/train.py", "--config", str(self.folder / "config.json"), "--join"],
            cwd=ROOT,
            stdout=self._output,
            stderr=self._output,
        )
        self._joined.add(stub.pid)
        return stub

    # --- what it has written ------------------------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        """Returns all complete lines of the run's metrics, and follows its changes of membership."""
        path = self.folder / "metrics.jsonl"
        with open(path, "rb") if path.exists() else open(os.devnull, "rb") as file:
            file.seek(self._offset)
            text = file.read().rpartition(b"\n")[0]
        self._offset += len(text) + 1 if text else 0
        new = [json.loads(line) for line in text.splitlines()]
        for change in (line for line in new if line.get("event") == "membership"):
            for each in change["who"]:
                self._grid.pop(each["rank"], None)
            self._grid |= {each["rank"]: stage_of(each["coordinates"]) for each in change["joined"]}
        self._lines += new
        return self._lines

    def last_step(self) -> int:
        return next((line["step"] for line in reversed(self.lines()) if "event" not in line), 0)

    def widths(self) -> tuple[int, ...]:
        """The replicas of each stage."""
        changes = [line for line in self.lines() if line.get("event") == "membership"]
        return tuple(changes[-1]["widths"]) if changes else (DP_SIZE,) * PP_SIZE

    def indispensable(self) -> set[int]:
        """Workers without which the run might end: all while victims are in the grid, or while its stages are not known
        and not every place is taken.

        A lost coordinator may not have written its last change: workers that ended long ago are out of the grid, and
        who has joined stands in its last line.
        """
        widths = self.widths()
        alive = self._running_ranks()
        joined = {int(rank): int(stage) for rank, stage in JOINS.findall((self.folder.parent / OUTPUT).read_text())}
        grid = {**{rank: stage for rank, stage in joined.items() if rank in alive}, **self._grid}
        running = alive | {rank for rank, struck_s in self._victims.items() if time.monotonic() - struck_s < NOTICED_S}
        self._grid = {rank: stage for rank, stage in grid.items() if rank in running}
        is_hurt = bool(self._victims.keys() & (self._grid.keys() | alive))
        is_known = Counter(self._grid.values()) == Counter(dict(enumerate(widths)))
        spared = {rank for rank, stage in self._grid.items() if is_hurt or widths[stage] == 1}
        is_whole = not is_hurt and widths == (DP_SIZE,) * PP_SIZE and len(alive) == sum(widths)
        return spared if is_known or is_whole else spared | alive

    def _running_ranks(self) -> set[int]:
        return {process.rank for process in self.processes() if process.role == "rank" and process.rank is not None}

    def note_victim(self, rank: int) -> None:
        self._victims[rank] = time.monotonic()

    # --- its processes ------------------------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        """Returns the stubs and all below them."""
        found: list[Process] = []
        for stub in self._stubs:
            below = _below(stub.pid)
            rank = next((process.rank for process in below if process.role == "rank"), None)
            is_running = stub.pid not in self._stopped_stubs
            found += [Process(pid=stub.pid, role="stub", rank=rank, is_running=is_running), *below]
        return found

    def sample(self) -> Sample:
        """Returns the sizes of all processes now, by role."""
        sizes: dict[str, list[Size]] = {}
        for process in self.processes():
            if (size := size_of(process.pid)) is not None:
                sizes.setdefault(process.role, []).append(size)
        parts = [path.parent.name for path in self.folder.rglob("*")]  # a checkpoint has as many as writers
        num_files = sum(1 for part in parts if part != "logs" and not part.startswith("step-"))
        return Sample(step=self.last_step(), sizes=sizes, num_run_files=num_files, widths=self.widths())

    # --- its course ---------------------------------------------------------------------------------------------------

    def await_steps(self, num_steps: int, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.last_step() < num_steps:
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise SystemExit(f"step {num_steps} never came")
            time.sleep(0.1)

    def await_whole(self, timeout_s: float) -> bool:
        """Waits until every place is taken and five more steps are done; False if that takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while self.widths() != (DP_SIZE,) * PP_SIZE or len(self._running_ranks()) < PP_SIZE * DP_SIZE:
            self.check_alive()
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.1)
        self.await_steps(self.last_step() + 5, timeout_s)
        return True

    def check_alive(self) -> None:
        """Lets stopped stubs go on, and starts what joins for killed ones. Raises SystemExit if another has ended."""
        for pid in [pid for pid, until_s in self._stopped_stubs.items() if time.monotonic() >= until_s]:
            self._go_on(pid)
        for place, stub in enumerate(self._stubs):
            code = stub.poll()
            if code == -signal.SIGKILL:
                self._stubs[place] = self._join()
            elif code == REFUSED and stub.pid in self._joined and self.num_refused < MAX_REFUSED:
                self.num_refused += 1
                self._stubs[place] = self._join()
            elif code is not None:
                raise SystemExit(f"the run has ended: stub {place}, exit code {code}:\n{self._tail()}")

    def note_stub(self, pid: int, *, is_stopped: bool) -> None:
        """Takes notice that a stub has been stopped for a while, or killed."""
        if is_stopped:
            self._stopped_stubs[pid] = time.monotonic() + STUB_STOPPED_S

    def stubs_of_coordinators(self) -> set[int]:
        return {stub.pid for stub in self._stubs if any(each.role == "coordinator" for each in _below(stub.pid))}

    def _go_on(self, pid: int) -> None:
        del self._stopped_stubs[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def press_ctrl_c(self) -> None:
        for pid in list(self._stopped_stubs):
            self._go_on(pid)
        for stub in self._stubs:
            stub.send_signal(signal.SIGINT)

    def await_end(self, timeout_s: float) -> list[int]:
        """Waits until all stubs have ended; returns their exit codes."""
        return [stub.wait(timeout_s) for stub in self._stubs]

    def end(self) -> None:
        """Ends what is still there."""
        for stub in self._stubs:
            stub.kill()
            stub.wait()
        self._output.close()

    def _tail(self) -> str:
        return (self.folder.parent / OUTPUT).read_text()[-4000:]


def train_command(folder: Path, flags: list[str]) -> list[str]:
    command = [sys.executable, "launch/train.py", "--config", "configs/quickstart.json"]
    cache = folder.parent / "cache"
    return [*command, f"run.directory={folder}", f"data.cache_directory={cache}", *FLAGS, *flags]


class UndisturbedRun:
    """One process that trains what the run does. Ctrl-C at the driver's terminal does not reach it."""

    def __init__(self, folder: Path, flags: list[str]):
        self._folder = folder
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, num_steps: int) -> None:
        alone = ("parallel.pp_size=1", "parallel.dp_size=1", f"run.num_steps={num_steps}")
        command = [*train_command(self._folder, self._flags), *alone]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)

    def lines(self) -> list[dict[str, Any]]:
        """Returns its metrics, once it has ended."""
        assert self._process is not None
        if self._process.wait():  # bounded: it trains a number of steps
            raise SystemExit("the undisturbed run fails")
        return [json.loads(line) for line in (self._folder / "metrics.jsonl").read_text().splitlines()]

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def stage_of(coordinates: str) -> int:
    found = COORDINATES.search(coordinates)
    assert found is not None, coordinates
    return int(found[1])


def size_of(pid: int) -> Size | None:
    """None if the process is gone, or a zombie."""
    folder = Path(f"/proc/{pid}")
    try:
        status = (folder / "status").read_text()
        num_files = len(list((folder / "fd").iterdir()))
    except OSError:
        return None
    figures = dict(re.findall(r"^(Threads|VmRSS):\s+(\d+)", status, flags=re.MULTILINE))
    if "VmRSS" not in figures:
        return None
    return Size(
        pid=pid, num_files=num_files, num_threads=int(figures["Threads"]), resident_mib=int(figures["VmRSS"]) / 1024
    )


def _below(pid: int) -> list[Process]:
    """The coordinator, guardian and worker below a stub; those that have just been forked have no name yet."""
    children = _children(pid)
    found = [_describe(child, None) for child in children]
    named = [process for process in found if process is not None]
    result = []
    for process in named:
        workers = [worker for child in _children(process.pid) if (worker := _describe(child, None)) is not None]
        rank = next((worker.rank for worker in workers if worker.role == "rank"), None)
        result += [Process(pid=process.pid, role=process.role, rank=rank, is_running=process.is_running), *workers]
    return result


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _describe(pid: int, rank: int | None) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    _, is_ours, role = name.partition("p3d-")
    state = rest.split()[0]
    if not is_ours or state in "ZX":
        return None
    role, _, number = role.partition("-")
    return Process(pid=pid, role=role, rank=int(number) if number else rank, is_running=state not in "Tt")
