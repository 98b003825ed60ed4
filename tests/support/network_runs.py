"""Real training on several hosts of a `Network`: one rank a host, data-parallel, on a shared file system."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.network_hosts import ROOT, Host, Network

TRAIN = str(ROOT / "launch" / "train.py")
TORCHRUN = str(Path(sys.executable).parent / "torchrun")
MASTER_PORT, RENDEZVOUS_PORT = 29500, 29400
NUM_STEPS = 60
TIMEOUT_S = 300
CONTROL_S = 6.0
"""Patience with silent hosts and cut paths."""
LAUNCHERS = ("variables", "torchrun")
STATIC = "torchrun static"
"""torchrun with the ranks of its hosts given, in place of the c10d rendezvous."""
RECORDED_EXIT = str(Path(__file__).with_name("recorded_exit.py"))
LEFT_OUT = re.compile(
    "the run can't go on here: this side reaches |the run goes on without this process: |the run's coordinator is gone"
)
"""What a user reads on a host that has been left behind and does not come back, whose exit code is 4."""
COMES_BACK = " comes back as rank "
SEEN_BY_TORCHRUN = re.compile(r"exitcode *: (-?[0-9]+)")
"""The code of its stub, in what a torchrun says. One that waits for a store out of its reach has not looked yet."""
OWN_FRAME = re.compile(r'File "(?![^"]*site-packages)[^"]*/parallel3d/')
"""In a traceback of ours. torchrun has its own: a child has failed, or its store can't be reached."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the process of one host's rank, the stub, has ended, also under torchrun."""

    code: int
    out: str


class NetworkRun:
    """A run in `folder` on all hosts of `network`, from its start on."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        *,
        launcher: str,
        text: Path,
        num_steps: int = NUM_STEPS,
        zero_stage: int = 1,
        **elastic: Any,
    ):
        self.network = network
        self._is_torchrun = launcher != "variables"
        self.directory = folder / "run"
        config = folder / "config.json"
        settings = _config(len(network.hosts), self.directory, text, elastic)
        settings["run"]["num_steps"] = num_steps
        settings["parallel"]["zero_stage"] = zero_stage
        config.write_text(json.dumps(settings))
        self._config = config
        self.processes = [
            host.popen(_command(launcher, network, host, config), env=_environment(launcher, network, host))
            for host in network.hosts
        ]

    def join(self, number: int) -> None:
        """Has a host whose processes are gone join the run by the command, in the place of its first process."""
        host = self.network.hosts[number]
        command = [*_command("variables", self.network, host, self._config), "--join"]
        plain = _environment("torchrun", self.network, host)
        self.processes[number].communicate(timeout=300)
        self.processes[number] = host.popen(command, env=plain)

    def wait_for_step(self, step: int) -> None:
        """Waits until the reporter has published `step`."""
        self.wait_until(lambda: self.steps()[-1:] >= [step], f"step {step}")

    def wait_for_change(self, number: int) -> dict[str, Any]:
        """Waits for this change of membership, from 1 on; returns its record."""
        self.wait_until(lambda: len(self.changes()) >= number, f"change {number}")
        return self.changes()[number - 1]

    def wait_for_worker_end(self, rank: int) -> None:
        """Waits until the process of a worker is gone."""
        log = self.directory / "logs" / f"rank-{rank}.log"
        host = self.network.hosts[rank]
        self.wait_until(lambda: not any(_writes_to(pid, log) for pid in host.pids()), f"the end of rank {rank}")

    def end(self) -> list[Ended]:
        """Waits for all hosts; none may keep a process of the run, and each says how it has ended.

        torchrun's own processes are killed once training has ended: without its store one waits for minutes.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while any(map(self._is_running, self.network.hosts, self.processes)):
            assert time.monotonic() < deadline, f"still running: {[host.pids() for host in self.network.hosts]}"
            time.sleep(0.05)
        if self._is_torchrun:
            for host in self.network.hosts:
                host.kill_all()
        outs = [process.communicate(timeout=300)[0] for process in self.processes]
        ended = [Ended(code=self._code(number), out=out) for number, out in enumerate(outs)]
        pattern = OWN_FRAME if self._is_torchrun else re.compile("Traceback")
        assert not any(map(pattern.search, outs)), "\n".join(outs)
        for each in ended:
            since_return = each.out.rpartition(COMES_BACK)[2]
            assert bool(LEFT_OUT.search(since_return)) == (each.code == 4), ended
            assert {int(code) for code in SEEN_BY_TORCHRUN.findall(each.out)} <= {each.code}, ended
        return ended

    def _code(self, number: int) -> int:
        """The exit code of a host's stub, which torchrun does not pass on."""
        if not self._is_torchrun:
            return int(self.processes[number].returncode)
        file = _exit_file(self._config, self.network.hosts[number])
        return int(file.read_text()) if file.exists() else -signal.SIGKILL

    def _is_running(self, host: Host, process: subprocess.Popen[str]) -> bool:
        """Also before it has begun. A torchrun that has started training counts as long as that lasts."""
        has_begun = self._is_torchrun and bool(self.steps())
        return bool(_training(host)) or (process.poll() is None and not has_begun)

    def steps(self) -> list[int]:
        return [line["step"] for line in self._step_lines()]

    def repeated_steps(self) -> list[int]:
        return [line["step"] for line in self._step_lines() if "num_attempts" in line]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self._step_lines()]

    def changes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._metrics().splitlines() if '"event": "membership"' in line]

    def num_live(self) -> int:
        """Workers of the newest membership."""
        return ([len(self.network.hosts)] + [change["live"] for change in self.changes()])[-1]

    def notices(self) -> list[str]:
        """What the run has told people, oldest first."""
        events = (json.loads(line) for line in self._metrics().splitlines() if '"event": "notice"' in line)
        return [event["text"] for event in events]

    def _step_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._metrics().splitlines() if '"event"' not in line]

    def _metrics(self) -> str:
        file = self.directory / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return text[: text.rfind("\n") + 1]

    def wait_until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert any(process.poll() is None for process in self.processes), f"ended before {what}: {self._outputs()}"
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self._state()}"
            time.sleep(0.02)

    def _state(self) -> str:
        """What a person would look at: how processes have ended, and what the run has recorded last."""
        codes = [process.poll() for process in self.processes]
        outs = [
            f"host {number} ended with {process.returncode}: {process.communicate(timeout=300)[0]}"
            for number, process in enumerate(self.processes)
            if process.poll() is not None
        ]
        events = [line for line in self._metrics().splitlines() if '"event"' in line][-20:]
        return "\n".join([f"exit codes: {codes}", *outs, *events, *self._metrics().splitlines()[-1:]])

    def _outputs(self) -> Sequence[str]:
        return [process.communicate(timeout=300)[0] for process in self.processes]


def _writes_to(pid: int, log: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/1") == str(log)
    except OSError:
        return False


def _training(host: Host) -> list[int]:
    """The processes of the run on a host: guardians and workers."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if TRAIN in words and TORCHRUN not in words:
                found.append(pid)
    return found


def _config(num_hosts: int, directory: Path, text: Path, elastic: dict[str, Any]) -> dict[str, Any]:
    model = dict(vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return {
        "model": model,
        "parallel": {"pp_size": 1, "dp_size": num_hosts},
        "batch": {"global_batch_size": 6, "micro_batch_size": 1, "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-2},
        "precision": {"sums": "exact"},  # a loss of workers changes no bit of the losses
        "data": {"sources": [str(text)], "cache_directory": str(text.parent / "cache")},
        "monitor": {"charts": False},
        "elastic": {"control_timeout_s": CONTROL_S, "max_rejoins": 0, **elastic},
        "run": {
            "threads_per_rank": 1,
            "evaluate_batches": 1,
            "directory": str(directory),
            "timeout_s": 60.0,
        },
    }


def _command(launcher: str, network: Network, host: Host, config: Path) -> list[str]:
    train = [TRAIN, "--config", str(config)]
    if launcher == "variables":
        return [sys.executable, *train]
    first = network.hosts[0].address
    static = ["--node_rank", str(host.number - 1), "--master_addr", first, "--master_port", str(MASTER_PORT)]
    c10d = ["--rdzv_backend", "c10d", "--rdzv_id", "run", "--rdzv_endpoint", f"{first}:{RENDEZVOUS_PORT}"]
    return [
        TORCHRUN,
        *("--nnodes", str(len(network.hosts)), "--nproc_per_node", "1", "--local_addr", host.address),
        *(static if launcher == STATIC else c10d),
        *(RECORDED_EXIT, str(_exit_file(config, host)), *train),
    ]


def _exit_file(config: Path, host: Host) -> Path:
    return config.with_name(f"exit-{host.name}")


def _environment(launcher: str, network: Network, host: Host) -> dict[str, str]:
    traces = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|OMPI_|PMI_|PMIX_|TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not traces.match(name)}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if launcher == "variables":
        kept |= {
            **{"RANK": str(host.number - 1), "WORLD_SIZE": str(len(network.hosts))},
            **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            **{"MASTER_ADDR": network.hosts[0].address, "MASTER_PORT": str(MASTER_PORT)},
        }
    return kept
