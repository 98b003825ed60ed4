"""Workers of real training are slow, and get less work: the run stays the same, bit for bit."""

import json
import signal
import time

import pytest

from tests.support.launch_runs import finish, metrics, start, wait_for_change, wait_for_step

pytestmark = pytest.mark.slow
SETTINGS = ("run.num_steps=100000", "precision.sums=exact", "elastic.balance=true")


def slow_replicas(run):
    """The replicas that are slow from a step on: a list for each change."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [set(line["slow"]) for line in lines if line.get("event") == "balance"]


def wait_until_slow(run, replica, is_slow, timeout=180):
    deadline = time.monotonic() + timeout
    while not (changes := slow_replicas(run)) or (replica in changes[-1]) is not is_slow:
        assert time.monotonic() < deadline, f"{replica} slow {is_slow}: {changes}"
        time.sleep(0.05)


def stop(process):
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in out, out + err
    return out


@pytest.mark.full
def test_a_slow_worker_gets_less_work_while_it_is_slow(config_file, tmp_path):
    """Rank 3 takes eight times as long for 40 steps; rank 0, which leads, dies meanwhile. On a busy machine others may
    count as slow, too."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    faults = [
        dict(rank=3, step=3, kind="slow", factor=8.0, num_steps=40),
        dict(rank=0, step=30, phase="backward", kind="kill"),
    ]
    process = start("--config", config_file, *SETTINGS, f"elastic.faults={json.dumps(faults)}")
    wait_for_step(run, 1)
    wait_until_slow(run, "pp1 dp1 (rank 3)", True)
    wait_for_change(run, 1, timeout=180)
    wait_until_slow(run, "pp1 dp1 (rank 3)", False)
    out = stop(process)
    assert "slow replicas, by the time of the fastest of their stage: " in out
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    process = start("--config", config_file, *SETTINGS, "elastic.balance=false", f"run.directory={undisturbed}")
    wait_for_step(undisturbed, len(lines), timeout=180)
    stop(process)
    assert slow_replicas(undisturbed) == []
    assert [line["loss"] for line in metrics(undisturbed)][: len(lines)] == [line["loss"] for line in lines]
