"""Measures the coordinator at sizes that no test machine has: the real one over loopback, with lightweight workers.

    python benchmarks/scale.py [--workers 64 1024 4096 10240] [--batch 1024 4096] [--per-guardian 8] [--relays]
                                [--behind 0.5]

Pipelines of 8 stages (64 workers: of 2) and 8 tensor-parallel ranks, 8 workers a host. A second process plays all
guardians and workers, and with `--relays` a relay on each host: they answer frames as real ones do, but hold no state.
Measured are the coordinator's process alone (CPU seconds, bytes that it sends, peak memory) and the wall time of both
processes:

    start     from the first connection to the commit of generation 0
    loss      from the death of one worker to the commit of the generation without it; `--behind` of the workers lack
              the newest entry, which has a cursor for each sequence of the batch
    groups    what the groups of that generation add to it, if the loss has come between two collectives
    regroup   the same, if it has come within collectives, so that all groups are built again: for gradients over gloo,
              of a host's tensor-parallel ranks in shared memory
    offer     from a guardian's offer of the lost worker's place to the instruction to start another one there
    join      from the new worker's hello, which has built its part at once, to the commit of the generation with it
    takeover  from the loss of the coordinator's host to the first commit of its successor, which has no relays

The pure parts alone: scale_pure.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.scale_clients import Clients
from parallel3d.config.schema import TimeoutConfig
from parallel3d.elastic.coordinator.coordinator import Coordinator
from parallel3d.elastic.coordinator.failover_coordinator import FailoverCoordinator
from parallel3d.elastic.coordinator.listener import open_listener
from parallel3d.elastic.coordinator.witness import Witness
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.handshake import new_secret
from parallel3d.parallel.grid import Grid

STAGES, TP, PER_HOST = 8, 8, 8
TIMEOUTS = LaunchTimeouts(failover_s=60.0)
LIMIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1024, 4096, 10240])
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 4096], help="sequences a step")
    parser.add_argument("--per-guardian", type=int, default=8, help="workers of a guardian; torchrun has 1")
    parser.add_argument("--relays", action="store_true", help="the guardians of a host share one connection")
    parser.add_argument("--behind", type=float, default=0.5, help="share of the workers that lack the newest entry")
    options = parser.parse_args()
    print("workers  batch   part        CPU s   wall s   MB sent   peak MB")
    for num_workers in options.workers:
        for batch in options.batch:
            size = Size(
                num_workers=num_workers,
                batch=batch,
                per_guardian=options.per_guardian,
                relays=options.relays,
                behind=options.behind,
            )
            run_apart(measure_loss, size)
        run_apart(measure_takeover, size)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One row's sizes."""

    num_workers: int
    batch: int
    per_guardian: int
    relays: bool
    behind: float

    @property
    def grid(self) -> Grid:
        stages = STAGES if self.num_workers > STAGES * TP else 2
        return Grid.uniform(tp_size=TP, pp_size=stages, dp_size=self.num_workers // (stages * TP))

    @property
    def elastic(self) -> ElasticSettings:
        timeout = TimeoutConfig(multiplier=1000.0, min_s=60.0, max_s=60.0)
        return ElasticSettings(
            grid=self.grid, zero_stage=1, zero_backups=1, heartbeat_timeout=timeout, watchdog_timeout=timeout
        )

    def guardian(self, number: int) -> GuardianInfo:
        ranks = tuple(range(number * self.per_guardian, (number + 1) * self.per_guardian))
        host = ranks[0] // PER_HOST
        return GuardianInfo(ranks=ranks, host=f"node{host:04}", address=(f"10.0.{host // 256}.{host % 256}", 29500))

    @property
    def guardians(self) -> tuple[GuardianInfo, ...]:
        return tuple(self.guardian(number) for number in range(self.num_workers // self.per_guardian))


def run_apart(measure_parts: Callable[[Size], None], size: Size) -> None:
    """Runs a measurement in a process of its own, whose peak memory is then the measurement's."""
    process = multiprocessing.get_context("spawn").Process(target=measure_parts, args=(size,))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode)


def raise_open_files() -> None:
    """Raises the soft limit to the hard one: each guardian is a socket in either process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measure_loss(size: Size) -> None:
    """Prints the rows of a start, of one loss, and of the join that makes it good."""
    raise_open_files()
    listener, secret = open_listener("127.0.0.1", 0), new_secret()
    coordinator = Coordinator(
        listener,
        secret=secret,
        world_size=size.num_workers,
        emit=lambda record: None,
        timeouts=TIMEOUTS,
        elastic=size.elastic,
        own_info=size.guardian(0),
    )
    with play_clients(size, listener.getsockname()[1], secret) as pipe:
        threading.Thread(target=coordinator.serve, daemon=True).start()
        for part in ("start", "loss", "groups", "regroup", "offer", "join"):
            measure(part, size, pipe)


def measure_takeover(size: Size) -> None:
    """Prints the row of a takeover: a host and its workers are lost with the coordinator."""
    raise_open_files()
    listener, secret = open_listener("127.0.0.1", 0), new_secret()
    hosts = tuple(sorted({guardian.host for guardian in size.guardians}))
    report: Any = SimpleNamespace(
        last_step=0, last_evaluation=-1, publish=lambda record: None, flush=lambda: None, recorded_preemptions=dict
    )
    coordinator = FailoverCoordinator(
        listener,
        secret=secret,
        failover_plan=FailoverPlan(coordinator=size.guardian(0), guardians=size.guardians, hosts=hosts),
        witness=Witness(None),
        open_report=lambda: report,
        world_size=size.num_workers,
        timeouts=TIMEOUTS,
        elastic=size.elastic,
        own_info=next(guardian for guardian in size.guardians if guardian.host == hosts[1]),
    )
    with play_clients(size, listener.getsockname()[1], secret) as pipe:
        threading.Thread(target=coordinator.serve, daemon=True).start()
        measure("takeover", size, pipe)


@contextmanager
def play_clients(size: Size, port: int, secret: bytes) -> Iterator[Pipe]:
    """Starts the process of the guardians and workers; yields the pipe that commands it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    clients = context.Process(target=run_clients, args=(size, port, secret, theirs))
    clients.start()
    theirs.close()
    try:
        assert ours.recv() == "ready"
        yield ours
    finally:
        clients.kill()
        clients.join()


def run_clients(size: Size, port: int, secret: bytes, pipe: Pipe) -> None:
    """Plays the guardians and workers as the pipe commands."""
    raise_open_files()
    clients = Clients(size.grid, size.guardians, batch=size.batch, behind=size.behind, relays=size.relays)
    pipe.send("ready")
    parts: dict[str, Callable[[], int]] = {
        "start": lambda: clients.start(("127.0.0.1", port), secret),
        "loss": lambda: clients.lose(rank=size.num_workers - 1),
        "groups": lambda: clients.build_groups(size.num_workers - 1, keeps=True),
        "regroup": lambda: clients.build_groups(size.num_workers - 1, keeps=False),
        "offer": lambda: clients.offer(lost=size.num_workers - 1),
        "join": clients.join,
        "takeover": lambda: clients.take_over(("127.0.0.1", port), secret),
    }
    while True:
        pipe.send(parts[pipe.recv()]())


def measure(part: str, size: Size, pipe: Pipe) -> None:
    """Runs one part and prints its row."""
    started, cpu = time.monotonic(), time.process_time()
    pipe.send(part)
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"{size}: {part} has taken more than {LIMIT_S:.0f} s")
    num_bytes = pipe.recv()
    wall_s, cpu_s = time.monotonic() - started, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    numbers = f"{cpu_s:9.3f} {wall_s:8.2f} {num_bytes / 1e6:9.2f} {peak:9.0f}"
    print(f"{size.num_workers:7,} {size.batch:6,}   {part:8} {numbers}", flush=True)


if __name__ == "__main__":
    main()
