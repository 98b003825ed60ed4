"""Worlds of real processes whose members change: run as a script, RUN_DIRECTORY SPEC, this file is their launcher.

A member takes part in the protocol as a trainer does, but what it trains is nothing: a step is a round of messages
through the store, which ends when all of the grid have contributed. SPEC is JSON:

    faults   [[rank, point, number, what], ...]: what happens to it when it comes to that point of that number
             point: step, build (number: how often it has built before), finish (number 0), and in the generation of
             that number report, moves, confirm, go
             what: kill, stop, term, exit, fail, hang, dawdle, suspect, slow (it says that it is too slow to be of use)
    layout   [pp_size, dp_size, tp_size]
    hosts    the name of each rank's host, where every rank has a launcher's process of its own
    num_steps, step_s, zero_stage, zero_backups, max_rejoins, probation_s, spares, witness, coordinator_host
    join_threshold, join_wait_s, relay_from
    notice   fields of the configuration's elastic.notice; notices: those of each rank, in its place
    joins    whether this process joins the run in RUN_DIRECTORY
    start_s, connect_s, control_s, failover_s, stop_s       of LaunchTimeouts
    heartbeat_s, watchdog_s                         the least of each
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from parallel3d.config.schema import NoticeConfig, TimeoutConfig
from parallel3d.elastic.guardian.heartbeat import Mode
from parallel3d.elastic.guardian.launcher_env import read_launcher_env
from parallel3d.elastic.launch import run_workers
from parallel3d.elastic.operator_link import reserve_place
from parallel3d.elastic.protocol.membership import (
    NO_GENERATION,
    GenerationRecord,
    LogPosition,
    StateReport,
    digest_entries,
)
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.elastic.worker.membership_client import PendingGeneration
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.errors import GenerationEnded, UserError
from parallel3d.monitor.run_folder import ContinuedRunFolder, RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from tests.support.processes import write_pids, write_step

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
BYTES_MOVED = 2**19
STEP_S = 0.01
LISTENER_PORTS = range(15000, 32768)
"""Below those that the system gives to outgoing connections."""
DAWDLE_S = 30.0
"""A member that dawdles goes on after that, whatever its test does."""


def start(
    directory: Path, *, variables: dict[str, str] | None = None, launcher: Sequence[str] = (), **spec: Any
) -> subprocess.Popen[str]:
    """The launcher's process of a world, its output piped. `launcher`: Python's arguments for one above this file."""
    return subprocess.Popen(
        [sys.executable, *launcher, __file__, str(directory), json.dumps(spec)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **(variables or {})},
        start_new_session=True,
    )


def start_on_hosts(directory: Path, hosts: list[str], **spec: Any) -> list[subprocess.Popen[str]]:
    """As a launcher without a store of its own does: a process for each rank, `hosts` saying where it thinks it is."""
    world = {"WORLD_SIZE": len(hosts), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        start(
            directory,
            variables={
                **{name: str(value) for name, value in world.items()},
                "RANK": str(rank),
                "LOCAL_RANK": str(hosts[:rank].count(host)),
                "LOCAL_WORLD_SIZE": str(hosts.count(host)),
            },
            **{"hosts": hosts, "layout": (1, len(hosts), 1), **spec},
        )
        for rank, host in enumerate(hosts)
    ]


def start_under_torchrun(
    directory: Path, hosts: Sequence[str], *, ranks_per_host: int, **spec: Any
) -> list[subprocess.Popen[str]]:
    """A torchrun for each host, each with the first one's address."""
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", str(ranks_per_host))
    if len(hosts) == 1:
        return [start(directory, launcher=[*torchrun, "--standalone"], **spec)]
    rendezvous = ("--nnodes", str(len(hosts)), "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    names = [host for host in hosts for _ in range(ranks_per_host)]
    return [
        start(directory, launcher=[*torchrun, *rendezvous, "--node_rank", str(number)], hosts=names, **spec)
        for number in range(len(hosts))
    ]


def free_port() -> int:
    """A port for a listener that comes later.

    Those who look for the listener before it is there try again and again from ports that the system chooses: it may
    choose the very port that they look for, which then is theirs.
    """
    for port in random.SystemRandom().sample(LISTENER_PORTS, 100):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("no free port")


@dataclass
class Member:
    """One worker: `state` is the number of steps it has made, which all must agree on."""

    context: WorkerContext
    faults: list[tuple[int, str, int, str]]
    num_steps: int
    step_s: float = STEP_S
    state: int = 0
    record: GenerationRecord | None = None
    token: AbortToken = field(default_factory=AbortToken)
    suspicion: str = ""
    num_builds: int = 0

    def run(self) -> int:
        """A spare that moves begins again, without what it held."""
        code = self.run_once()
        while self.context.control.membership.take_move():
            self.record, self.state, self.suspicion = None, 0, ""
            code = self.run_once()
        return code

    def run_once(self) -> int:
        membership = self.context.control.membership
        self.come_to("build", self.num_builds)
        self.num_builds += 1
        membership.announce_ready()
        while (pending := membership.next_generation(self.report, suspicion=self.suspicion)) is not None:
            self.token = pending.token
            try:
                self.join(pending)
                if self.context.rank in pending.record.draining:
                    return 0
                self.suspicion = ""
                if pending.record.grid.holds(self.context.rank):
                    self.train(pending.record)
                    self.come_to("finish", 0)
                    membership.finish()
                    print("done")
                    return 0
            except GenerationEnded as error:
                self.suspicion = str(error)
                print(f"left: {error}")
        return 0

    def report(self, generation: int) -> StateReport:
        self.come_to("report", generation)
        entries = str(self.state).encode()
        return StateReport(
            rank=self.context.rank,
            generation=generation,
            state_generation=self.record.generation if self.record else NO_GENERATION,
            position=LogPosition(iteration=self.state),
            entries=entries,
            digest=digest_entries(entries),
            version=self.state,
            host=self.context.host,
            address=("127.0.0.1", 1),
        )

    def join(self, pending: PendingGeneration) -> None:
        rank, control, record = self.context.rank, self.context.control, pending.record
        self.state = record.position.iteration if rank in record.joiners else int(pending.entries or self.state)
        self.come_to("moves", record.generation)
        has_place = record.grid.holds(rank)
        self.come_to("confirm", record.generation)
        started = time.monotonic()
        control.membership.confirm(record.generation, digest="same" if has_place else "", moved_bytes=BYTES_MOVED)
        self.record = record
        print(f"generation {record.generation}: {list(record.grid.ranks)} from step {record.position.iteration}")
        self.come_to("commit", record.generation)
        if rank == record.grid.ranks[0]:
            if record.previous is None:
                control.publish({"kind": "total", "num_steps": self.num_steps})
                control.publish({"kind": "round_trip", "seconds": 0.0003})
            else:
                regroup_s = time.monotonic() - started
                resumed = {
                    "generation": record.generation,
                    "regroup_s": regroup_s,
                    "plan": "as planned",
                    "direction": "back",
                }
                control.publish({"kind": "resumed", **resumed})
            for step in range(record.last_reported_step + 1, self.state + 1):  # perhaps not yet published
                control.publish({"kind": "step", "step": step, "loss": 8.0 / step, "step_s": STEP_S})
        self.context.heartbeat.mode = Mode.RUNNING

    def train(self, record: GenerationRecord) -> None:
        while self.state < self.num_steps:
            step, started = self.state + 1, time.monotonic()
            self.context.heartbeat.step = step
            print(f"begins step {step}")
            self.come_to("step", step)
            self.token.sleep(self.step_s)
            words = self.gather(record, f"step{step}")
            self.state = step
            write_step(Path(sys.argv[1]), self.context.rank, record.generation, step)
            if self.context.rank == record.grid.ranks[0]:
                step_s = time.monotonic() - started
                self.context.control.publish({"kind": "step", "step": step, "loss": 8.0 / step, "step_s": step_s})
            if b"stop" in words:
                return
            if b"leave" in words:
                raise GenerationEnded("a worker leaves or joins")

    def gather(self, record: GenerationRecord, what: str) -> list[bytes]:
        """The contributions of all ranks of the grid: their wishes."""
        control, key = self.context.control, f"generation{record.generation}/{what}"
        leaves = control.drain_requested or control.membership.change_requested
        wish = b"stop" if control.stop_requested else b"leave" if leaves else b""
        control.set(f"{key}/{self.context.rank}", wish)
        return [control.get(f"{key}/{rank}", self.token) for rank in record.grid.ranks]

    def come_to(self, point: str, number: int) -> None:
        """Injects the faults of this point, once."""
        self.context.heartbeat.tick()
        for fault in [fault for fault in self.faults if fault[1:3] == (point, number)]:
            self.faults.remove(fault)
            what = fault[3]
            self.context.control.check([""], self.context.control.token)  # all that was said before has been heard
            if what == "exit":
                os._exit(0)
            if what == "fail":
                raise ValueError("injected")
            if what == "suspect":
                raise GenerationEnded("something only I have seen")
            if what == "slow":
                asks = {"kind": "drain_slow", "step": number, "text": f"rank {self.context.rank} is slow"}
                self.context.control.publish({**asks, "ranks": [self.context.rank]})
                return
            if what == "hang":
                time.sleep(60)  # its heart goes on beating
            if what == "dawdle":
                dawdle(Path(sys.argv[1]), self.context.rank, self.context.heartbeat.tick)
                return
            os.kill(os.getpid(), SIGNALS[what])


def dawdle(directory: Path, rank: int, tick: Callable[[], None]) -> None:
    """Announces that a worker is where it should be struck; stays there until that has happened, and a moment more."""
    Path(directory, f"dawdling-{rank}").touch()
    deadline = time.monotonic() + DAWDLE_S
    while not Path(directory, "struck").exists() and time.monotonic() < deadline:
        tick()
        time.sleep(0.01)
    time.sleep(0.2)


def member(spec: dict[str, Any], context: WorkerContext) -> int:
    write_pids(Path(sys.argv[1]), context.rank)
    faults = [(rank, point, number, what) for rank, point, number, what in spec.get("faults", ())]
    mine = [fault for fault in faults if fault[0] == context.rank]
    if context.is_spare and context.control.membership.await_part() is None:
        return 0
    num_steps, step_s = spec.get("num_steps", 20), spec.get("step_s", STEP_S)
    return Member(context=context, faults=mine, num_steps=num_steps, step_s=step_s).run()


def main() -> int:
    directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
    pp_size, dp_size, tp_size = spec.get("layout", (2, 2, 1))
    grid = Grid.uniform(pp_size=pp_size, dp_size=dp_size, tp_size=tp_size)
    env = read_launcher_env(os.environ)
    try:
        env = reserve_place(directory, None, "") if spec.get("joins") else env
        notice = spec["notices"][env.rank] if env and "notices" in spec else spec.get("notice", {})
        return run_workers(
            partial(member, spec),
            world_size=len(grid.ranks) + spec.get("spares", 0),
            logs=directory / "logs",
            open_report=lambda: RunReporter(
                RunFolder(directory, config="{}", environment={}), title="members", charts=False
            ),
            reopen_report=lambda: RunReporter(ContinuedRunFolder(directory), title="members", charts=False),
            env=env,
            host=spec.get("host") or (spec["hosts"][env.rank] if env and "hosts" in spec else None),
            timeouts=LaunchTimeouts(
                start_s=spec.get("start_s", 100.0),
                connect_s=spec.get("connect_s", 100.0),
                failover_s=spec.get("failover_s", 6.0),
                abort_grace_s=1.0,
                stop_grace_s=spec.get("stop_s", 3.0),
                control_s=spec.get("control_s", 30.0),
                change_s=spec.get("change_s", 120.0),
            ),
            elastic=ElasticSettings(
                grid=grid,
                zero_stage=spec.get("zero_stage", 1),
                zero_backups=spec.get("zero_backups", 1),
                max_rejoins=spec.get("max_rejoins", 0),
                probation_s=spec.get("probation_s", 300.0),
                join_threshold=spec.get("join_threshold", 1),
                join_wait_s=spec.get("join_wait_s", 60.0),
                heartbeat_timeout=TimeoutConfig(multiplier=1.0, min_s=spec.get("heartbeat_s", 0.3), max_s=5.0),
                watchdog_timeout=TimeoutConfig(multiplier=1.0, min_s=spec.get("watchdog_s", 1.5), max_s=60.0),
                witness=spec.get("witness"),
                coordinator_host=spec.get("coordinator_host"),
                notice=NoticeConfig(**notice),
                relay_from=spec.get("relay_from", 256),
            ),
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
