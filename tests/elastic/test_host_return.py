"""A launcher's process that has lost its run looks for it, and runs again as a worker that joins."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from parallel3d.elastic import host_return
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.host_return import HostReturn
from parallel3d.errors import LaunchError

ENV = LauncherEnv(rank=2, local_rank=0, world_size=3, local_world_size=1, master_addr="10.77.0.1", master_port=29500)


class Run:
    """A run that ends with `codes`, one after the other, and is found at the attempt of number `found_at`."""

    def __init__(self, *codes: int, found_at: int = 2):
        self.codes, self.found_at = list(codes), found_at
        self.ranks: list[int | None] = []
        self.num_attempts = 0

    def start(self, env: LauncherEnv | None) -> int:
        self.ranks.append(None if env is None else env.rank)
        return self.codes.pop(0)

    def find_place(self) -> LauncherEnv:
        self.num_attempts += 1
        if self.num_attempts < self.found_at:
            raise LaunchError("no run goes on there")
        return replace(ENV, rank=10 + len(self.ranks), joins=True)

    def end(self, env: LauncherEnv | None = ENV, *, max_rejoins: int = 3, return_s: float = 60.0) -> int:
        return HostReturn(find_place=self.find_place, max_rejoins=max_rejoins, return_s=return_s).run(self.start, env)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(host_return, "TRY_EVERY_S", 0.01)


def test_it_comes_back_as_often_as_it_may():
    run = Run(4, 4, 0)
    assert run.end() == 0 and run.ranks == [2, 11, 12]
    run = Run(4, 4, 4)
    assert run.end(max_rejoins=2) == 4 and run.ranks == [2, 11, 12]


@pytest.mark.parametrize("code", [0, 1, 3, 130])
def test_other_ends_stay(code):
    run = Run(code)
    assert run.end() == code and run.num_attempts == 0


@pytest.mark.parametrize(
    "env",
    [
        None,
        replace(ENV, local_world_size=3),
        replace(ENV, master_addr="127.0.0.1"),
        replace(ENV, master_addr="localhost"),
    ],
)
def test_one_host_has_no_run_to_come_back_to(env):
    run = Run(4)
    assert run.end(env) == 4 and run.num_attempts == 0


def test_it_gives_up_in_the_end(capfd):
    run = Run(4, found_at=10**9)
    assert run.end(return_s=0.1) == 4 and run.ranks == [2] and run.num_attempts > 0
    assert "rank 2 stays out: no run goes on there" in capfd.readouterr().err
    assert Run(4).end(max_rejoins=0) == 4 and "stays out" not in capfd.readouterr().err


def test_a_stop_signal_ends_the_search(monkeypatch):
    run = Run(4, found_at=10**9)
    monkeypatch.setattr(run, "find_place", lambda: os.kill(os.getpid(), signal.SIGTERM) or Run.find_place(run))
    assert run.end() == 143 and run.num_attempts == 1
