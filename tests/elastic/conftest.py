"""A coordinator of two workers within the test's own process."""

from __future__ import annotations

import pytest

from parallel3d.config.schema import TimeoutConfig
from parallel3d.elastic.coordinator.coordinator import Coordinator
from parallel3d.elastic.coordinator.listener import open_listener
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.parallel.grid import Grid
from tests.support.coordinator_threads import ServingThread
from tests.support.run_secrets import SECRET, open_connection


@pytest.fixture
def elastic_settings():
    """Settings of a run on a grid: half a second of silence, a minute of standstill."""

    def settings(grid: Grid) -> ElasticSettings:
        return ElasticSettings(
            grid=grid,
            zero_stage=1,
            zero_backups=1,
            heartbeat_timeout=TimeoutConfig(multiplier=1000.0, min_s=0.5, max_s=5.0),
            watchdog_timeout=TimeoutConfig(multiplier=1.0, min_s=60.0, max_s=600.0),
        )

    return settings


@pytest.fixture
def elastic():
    """The settings with which the world's coordinator survives losses; None: a loss ends the run."""
    return None


@pytest.fixture
def world(elastic):
    """A coordinator of two workers and a guardian's bare connection: (address, connect, guardian, records)."""
    records: list[dict] = []
    listener = open_listener("127.0.0.1", 0)
    address = ("127.0.0.1", listener.getsockname()[1])
    coordinator = Coordinator(
        listener, secret=SECRET, world_size=2, emit=records.append, timeouts=LaunchTimeouts(), elastic=elastic
    )
    serving = ServingThread(coordinator)
    hello = {"op": "hello", "role": "guardian", "ranks": [0, 1], "host": "here", "address": list(address)}
    guardian = open_connection(address, hello)

    def connect(rank: int) -> ControlChannel:
        hello = {"op": "hello", "role": "worker", "ranks": [rank], "host": "here", "log": ""}
        controls.append(ControlChannel(open_connection(address, hello), rank=rank, world_size=2))
        return controls[-1]

    controls: list[ControlChannel] = []
    yield address, connect, guardian, records
    for control in controls:
        control.finish(0)
    guardian.close()
    serving.join(5)
