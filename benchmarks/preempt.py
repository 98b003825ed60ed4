"""Trains on hosts that are taken away at random, with a notice, and come back; compares with an undisturbed run.

    python benchmarks/preempt.py [--hosts 6] [--notices 3] [--steps 150] [--return-s 2] [--seed 0] [--pinned]
        [--text FILE]

Each host is a process with a host name of its own (`unshare --uts`), and has one worker. At random steps a random host
gets SIGUSR1, its `elastic.notice`; when its worker has left, what is left of it is killed, and some seconds later a new
host joins by the command. With --pinned the coordinator stays on the first host, which is never taken away: the one
machine that is not preemptible. Otherwise its host is the first to go.

Said at the end: how long workers took to leave, how long changes paused the run, how many workers were lost in place of
leaving (each loss may repeat a step), and in how many steps the loss is that of one process (sums are exact).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN = (sys.executable, str(ROOT / "launch" / "train.py"))
ON_HOST = ("unshare", "--map-root-user", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
FLAGS = (
    *("model.vocab_size=1024", "model.hidden_size=64", "model.intermediate_size=192", "model.num_attention_heads=4"),
    *("batch.sequence_length=32", "batch.micro_batch_size=1", "batch.global_batch_size=12", "precision.sums=exact"),
    *("lr_schedule.kind=constant", "run.evaluate_every=null", "monitor.charts=false"),
)
NOTICE = (
    'elastic.notice={"signal": "USR1", "deadline_s": 60}',
    *("elastic.control_timeout_s=60", "elastic.max_rejoins=0", "parallel.pp_size=1"),
)
TRY_AGAIN = (2, 3, 4)
"""Exit codes of a host that could not join, as no coordinator served at that moment or the machine was too busy."""
LIMIT_S = 1800.0


@dataclass
class Host:
    """One machine of the run."""

    name: str
    process: subprocess.Popen[bytes]
    noticed_s: float | None = None


class PreemptedRun:
    """A run in `folder`, and its hosts."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.directory = folder / "run"
        self._output = open(folder / "output.txt", "ab")  # noqa: SIM115 (closed in close)
        self._flags = [*flags_of(options, self.directory), f"parallel.dp_size={options.hosts}", *NOTICE]
        if options.pinned:
            self._flags.append("elastic.coordinator_host=host0")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        self.hosts = [self._start(number, options.hosts, port) for number in range(options.hosts)]
        self._num_started = options.hosts
        self.returns: list[float] = []
        """When hosts come that replace others."""
        self.left_s: list[float] = []
        """From a notice to the end of the host's process."""

    def _start(self, number: int, num_hosts: int, port: str) -> Host:
        world = {"RANK": number, "WORLD_SIZE": num_hosts, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        variables = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}
        return self._popen(f"host{number}", ["--config", "quickstart", *self._flags], variables)

    def _popen(self, name: str, arguments: list[str], variables: dict[str, str]) -> Host:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        command = [*ON_HOST, name, *TRAIN, *arguments]
        return Host(name, subprocess.Popen(command, env=environment, stdout=self._output, stderr=self._output))

    def lines(self) -> list[dict[str, Any]]:
        file = self.directory / "metrics.jsonl"
        text = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def notify(self, host: Host) -> None:
        host.noticed_s = time.monotonic()
        host.process.send_signal(signal.SIGUSR1)

    def turn(self, return_s: float) -> None:
        """Takes away hosts whose workers have left, and starts those whose time has come."""
        now_s = time.monotonic()
        for host in list(self.hosts):
            code = host.process.poll()
            if host.noticed_s is not None and (code is not None or not has_worker(host.process.pid)):
                host.process.kill()  # all below it ends with it
                host.process.wait()
                self.left_s.append(now_s - host.noticed_s)
                self.returns.append(now_s + return_s)
                self.hosts.remove(host)
            elif code in TRY_AGAIN:
                self.hosts.remove(host)
                self.returns.append(now_s + return_s)
            elif code:
                raise SystemExit(f"{host.name} has ended with exit code {code}; see {self._output.name}")
        for _ in [due_s for due_s in self.returns if due_s <= now_s]:
            config = str(self.directory / "config.json")
            self.hosts.append(self._popen(f"host{self._num_started}", ["--config", config, "--join"], {}))
            self._num_started += 1
        self.returns = [due_s for due_s in self.returns if due_s > now_s]

    def close(self) -> None:
        for host in self.hosts:
            host.process.kill()
            host.process.wait()
        self._output.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=6)
    parser.add_argument("--notices", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--return-s", type=float, default=2.0, help="from a host's end until another one comes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pinned", action="store_true", help="the coordinator's host stays")
    parser.add_argument("--text", help="a file or folder of text; Python's standard library if not given")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="preempt") as name:
        folder = Path(name)
        lines, left_s = train_under_notices(folder, options)
        print("\n".join(describe(lines, left_s, undisturbed_losses(folder / "undisturbed", options))))


def flags_of(options: argparse.Namespace, directory: Path) -> list[str]:
    sources = [f"data.sources={json.dumps([options.text])}"] if options.text else []
    return [*FLAGS, *sources, f"run.num_steps={options.steps}", f"run.directory={directory}"]


def train_under_notices(folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[float]]:
    """Returns the lines of the run's metrics, and the seconds in which hosts with a notice were empty."""
    chance, limit_s = random.Random(options.seed), time.monotonic() + LIMIT_S
    at_steps = sorted(chance.sample(range(5, options.steps * 2 // 3), options.notices))
    run = PreemptedRun(folder, options)
    try:
        while any(host.process.poll() is None for host in run.hosts):
            if time.monotonic() > limit_s:
                raise SystemExit(f"the run has not ended within {LIMIT_S:g} s")
            last_step = max((line["step"] for line in run.lines() if "event" not in line), default=0)
            if at_steps and last_step >= at_steps[0]:
                at_steps.pop(0)
                run.notify(choose(run.hosts, chance, options, is_first=len(at_steps) == options.notices - 1))
            if last_step < options.steps:
                run.turn(options.return_s)
            time.sleep(0.05)
        return run.lines(), run.left_s
    finally:
        run.close()


def has_worker(pid: int) -> bool:
    """Whether a worker is below a process."""
    try:
        if Path(f"/proc/{pid}/comm").read_text().startswith("p3d-rank"):
            return True
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return False
    return any(has_worker(int(child)) for child in children)


def choose(hosts: list[Host], chance: random.Random, options: argparse.Namespace, *, is_first: bool) -> Host:
    """The host that is taken away next."""
    there = [
        host
        for host in hosts
        if host.noticed_s is None and has_worker(host.process.pid) and not (options.pinned and host.name == "host0")
    ]
    return there[0] if is_first and not options.pinned else chance.choice(there)


def undisturbed_losses(directory: Path, options: argparse.Namespace) -> list[float]:
    """The losses of one process."""
    command = [*TRAIN, "--config", "quickstart", *flags_of(options, directory)]
    flags = ("parallel.pp_size=1", "parallel.dp_size=1", "parallel.tp_size=1")
    subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "event" not in line]


def describe(lines: list[dict[str, Any]], left_s: list[float], undisturbed: list[float]) -> Iterator[str]:
    """The outcome, in lines."""
    steps = [line for line in lines if "event" not in line]
    changes = [line for line in lines if line.get("event") == "membership"]
    losses = [line["loss"] for line in steps]
    pauses = [change["agree_s"] + change["repair_s"] + change["regroup_s"] for change in changes]
    num_lost = sum("lost" in change["why"] for change in changes)
    num_back = sum(len(change["joined"]) for change in changes)
    numbers = [line["step"] for line in steps]
    num_equal = sum(ours == theirs for ours, theirs in zip(losses, undisturbed))
    num_live = changes[-1]["live"] if changes else "all"
    yield f"{len(left_s)} hosts were taken away, {num_back} came; workers at the end: {num_live}"
    yield f"a host with a notice was empty after {median(left_s)} s; a change paused the run for {median(pauses)} s"
    is_whole = numbers == list(range(1, len(undisturbed) + 1))
    num_twice = sum("num_attempts" in line for line in steps)
    yield f"steps: {len(numbers)}, each once: {is_whole}, begun twice: {num_twice}; changes by a loss: {num_lost}"
    yield f"losses that are one process's bit for bit: {num_equal} of {len(undisturbed)}; the last {losses[-1]:.4f}"


def median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} [{max(seconds):.3f}]" if seconds else "-"


if __name__ == "__main__":
    main()
