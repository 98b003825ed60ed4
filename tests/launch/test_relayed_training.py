"""Real training whose guardians share a connection for each host: relays change no bit, whoever is killed.

Four ranks on what they take for two hosts, of which each has a replica of both stages. Sums are exact.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch_runs import (
    STARTED,
    child_of,
    children_of,
    finish,
    metrics,
    name_of,
    wait_for_step,
    workers_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]
HOSTS, NUM_STEPS, STRIKE_STEP = "abab", 60, 5
ROOT = Path(__file__).parents[2]
NEVER, HELD, FOUR, FIVE = "never", "step", 4, 5


def start_ranks(config_file, run, relay_from, held=NEVER, *more, hosts=HOSTS):
    """One stub for each rank, from the variables that a launcher sets; steps take 0.1 s more. With HELD, rank 1 waits
    after STRIKE_STEP until the file `struck` is there, so that the run can't end before the test has looked at it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = (f"run.num_steps={NUM_STEPS}", "precision.sums=exact", f"elastic.relay_from={relay_from}", *more)
    holding = [str(run.parent), held, str(STRIKE_STEP + 1)]
    script = [sys.executable, "-m", "tests.support.dawdling_training", *holding, hosts]
    command = [*script, "--config", str(config_file), *settings]
    shared = {"WORLD_SIZE": len(hosts), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    stubs = []
    for rank in range(len(hosts)):
        local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
        variables = {**shared, "RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
        stubs.append(
            subprocess.Popen(
                [*command, f"run.directory={run}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                start_new_session=True,
                cwd=ROOT,
            )
        )
    STARTED.extend(stubs)
    return stubs


def losses_after(stubs, run, *, codes):
    ends = [finish(stub) for stub in stubs]
    assert [code for code, _, _ in ends] == codes, ends
    assert [line["step"] for line in metrics(run)] == list(range(1, NUM_STEPS + 1))
    return [line["loss"] for line in metrics(run)]


def lost_ranks(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changes = [line for line in lines if line.get("event") == "membership"]
    return {worker["rank"] for change in changes for worker in change["who"]}


def relays_of(stubs):
    return [rank for rank, stub in enumerate(stubs) if "p3d-relay" in children_names(stub)]


def children_names(stub):
    return sorted(map(name_of, children_of(stub.pid)))


def assert_relays(stubs, run, ranks):
    """Fails with what the stubs run and have printed, and with the run's events."""
    if relays_of(stubs) != ranks:
        running = [(stub.poll(), children_names(stub)) for stub in stubs]
        for stub in stubs:
            stub.kill()
        events = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"event"' in line]
        pytest.fail(f"relays of {ranks} wanted\n{running}\n{events}\n{[finish(stub) for stub in stubs]}")


@pytest.fixture
def direct(config_file, tmp_path):
    """The losses where each guardian has a connection of its own."""
    run = tmp_path / "direct"
    stubs = start_ranks(config_file, run, FIVE)
    wait_for_step(run, STRIKE_STEP)
    assert_relays(stubs, run, [])
    return losses_after(stubs, run, codes=[0, 0, 0, 0])


@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize(
    ("victim", "lost"), [pytest.param("worker", {3}, id="worker"), pytest.param("relay", {1, 3}, id="relay")]
)
def test_relays_and_what_dies_behind_them_change_no_bit(config_file, tmp_path, direct, victim, lost):
    run = tmp_path / "relayed"
    stubs = start_ranks(config_file, run, FOUR, HELD)
    wait_for_step(run, STRIKE_STEP)
    assert_relays(stubs, run, [0, 1])
    (worker,) = workers_of(stubs[3].pid)
    os.kill(worker if victim == "worker" else child_of(stubs[1].pid, "relay"), signal.SIGKILL)
    (tmp_path / "struck").touch()
    assert losses_after(stubs, run, codes=[0, 0, 0, 0]) == direct
    assert lost_ranks(run) == lost
