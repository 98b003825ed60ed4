"""How a host comes back by itself that its run goes on without: it was cut off, or frozen, and has healed.

All processes of the run on that host have ended, with exit code 4, but the one that a launcher started. That one then
does what `train.py --join` does, again and again, until it finds a coordinator; its worker gets a new number.

    run ends with 4    > find the run by its folder    > run again, as a worker that joins    > the run's exit code
                         or give up: exit code 4
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from parallel3d.elastic.coordinator.run_status import EXIT_BY_SIGNAL
from parallel3d.elastic.guardian.discovery import is_one_host
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.guardian.rejoin_schedule import COUNTED_S
from parallel3d.elastic.guardian.signals import Signals
from parallel3d.errors import EXIT_COORDINATOR_LOST, LaunchError

TRY_EVERY_S = 2.0


@dataclass(kw_only=True)
class HostReturn:
    """Runs a launcher's process of a run, and brings it back up to `max_rejoins` times in an hour.

    find_place: returns the environment of a new worker of the run; raises LaunchError if no coordinator is reached.
    return_s: how long the run is looked for.
    """

    find_place: Callable[[], LauncherEnv]
    max_rejoins: int
    return_s: float
    _losses: list[float] = field(default_factory=list)
    """When this host has lost the run."""

    def run(self, start: Callable[[LauncherEnv | None], int], env: LauncherEnv | None) -> int:
        """Calls `start`, and again with a new worker's environment while it ends by the loss of the coordinator and
        this host is one of several; returns the last exit code."""
        exit_code = start(env)
        while exit_code == EXIT_COORDINATOR_LOST and env is not None and is_one_of_several(env) and self._may_return():
            found = self._look_for_run(env.rank)
            if isinstance(found, int):
                return found
            print(f"rank {env.rank} comes back as rank {found.rank}", file=sys.stderr, flush=True)
            env = found
            exit_code = start(env)
        return exit_code

    def _may_return(self) -> bool:
        now_s = time.monotonic()
        self._losses = [*(loss_s for loss_s in self._losses if now_s - loss_s < COUNTED_S), now_s]
        return len(self._losses) <= self.max_rejoins

    def _look_for_run(self, rank: int) -> LauncherEnv | int:
        """Returns the environment of a new worker, or the exit code of a process that stays out."""
        deadline, parent, why = time.monotonic() + self.return_s, os.getppid(), "no time to look for it"
        print(f"rank {rank} looks for its run for up to {self.return_s:g} s, to join it", file=sys.stderr, flush=True)
        with Signals() as signals:
            while time.monotonic() < deadline and os.getppid() == parent:
                if signals.wait(TRY_EVERY_S):
                    return EXIT_BY_SIGNAL + signals.stops[0]
                try:
                    return self.find_place()
                except LaunchError as error:
                    why = str(error)
        print(f"rank {rank} stays out: {why}", file=sys.stderr, flush=True)
        return EXIT_COORDINATOR_LOST


def is_one_of_several(env: LauncherEnv) -> bool:
    """Whether other hosts may go on without this one."""
    is_loopback = env.master_addr == "localhost" or env.master_addr.startswith("127.")  # hosts in name only
    return not (is_one_host(env) or is_loopback)
