"""Where a coordinator listens: at the interface that the hosts use, and at loopback on one host."""

from __future__ import annotations

import socket

import pytest

from parallel3d.elastic.guardian.discovery import listening_host
from parallel3d.elastic.guardian.launcher_env import LauncherEnv


def env(master: str, *, local_world_size: int | None = 2) -> LauncherEnv:
    return LauncherEnv(
        rank=0, local_rank=0, world_size=4, local_world_size=local_world_size, master_addr=master, master_port=29500
    )


@pytest.fixture
def routes(monkeypatch):
    """This host's address on the route to each master."""
    known = {"10.1.2.3": "10.1.2.3", "first": "10.1.2.3", "own-name": "127.0.1.1", "10.1.2.9": "10.1.2.4"}

    class Probe:
        def __init__(self, *kind):
            self.master = ""

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def connect(self, address):
            self.master = address[0]
            if not self.master.startswith("127.") and self.master not in (*known, "localhost"):
                raise OSError("no such name")

        def getsockname(self):
            return known.get(self.master, "127.0.0.1"), 1

    monkeypatch.setattr(socket, "socket", Probe)


@pytest.mark.parametrize(
    "of, expected",
    [
        (None, "127.0.0.1"),
        (env("10.1.2.3", local_world_size=4), "127.0.0.1"),  # one host
        (env("10.1.2.3"), "10.1.2.3"),
        (env("first"), "10.1.2.3"),
        (env("10.1.2.9"), "10.1.2.4"),  # another host that may take over
        (env("10.1.2.3", local_world_size=None), "10.1.2.3"),
        (env("127.0.0.2"), "127.0.0.2"),  # hosts in name only
        (env("localhost"), "localhost"),
        (env("own-name"), ""),  # what the others resolve is not known here
        (env("nowhere"), ""),
    ],
)
def test_listening_host(routes, of, expected):
    assert listening_host(of) == expected
