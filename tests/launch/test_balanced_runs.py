"""Workers of real training are slow, and get less work: the run stays the same, bit for bit."""

import json
import signal
import time

import pytest

from tests.support.launch_runs import PATIENCE_S, finish, metrics, start, wait_for_change, wait_for_step

pytestmark = pytest.mark.slow
SETTINGS = ("run.num_steps=100000", "precision.sums=exact", "elastic.balance=true")


def events(run, kind):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    return [line for line in lines if line.get("event") == kind]


def slow_replicas(run):
    """The replicas that are slow from a step on: a list for each change."""
    return [set(line["slow"]) for line in events(run, "balance")]


def wait_until_slow(run, replica, is_slow, timeout=PATIENCE_S):
    deadline = time.monotonic() + timeout
    while not (changes := slow_replicas(run)) or (replica in changes[-1]) is not is_slow:
        assert time.monotonic() < deadline, f"{replica} slow {is_slow}: {changes}"
        time.sleep(0.05)


def wait_until(condition, what, timeout=PATIENCE_S):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
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
    wait_for_change(run, 1)
    wait_until_slow(run, "pp1 dp1 (rank 3)", False)
    out = stop(process)
    assert "slow replicas, by the time of the fastest of their stage: " in out
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    process = start("--config", config_file, *SETTINGS, "elastic.balance=false", f"run.directory={undisturbed}")
    wait_for_step(undisturbed, len(lines))
    stop(process)
    assert slow_replicas(undisturbed) == []
    assert [line["loss"] for line in metrics(undisturbed)][: len(lines)] == [line["loss"] for line in lines]


@pytest.mark.full
def test_a_worker_of_no_use_leaves_and_another_one_comes(config_file, tmp_path):
    """Rank 3 takes thirty times as long; rank 2 dies meanwhile. Both places are taken again. Sums are exact: no loss
    changes by a bit."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    faults = [
        dict(rank=3, step=2, kind="slow", factor=30.0),
        dict(rank=2, step=25, phase="backward", kind="kill"),
    ]
    rejoins = ("elastic.max_rejoins=3", "elastic.probation_s=2.0", f"elastic.faults={json.dumps(faults)}")
    layout = ("parallel.pp_size=1", "parallel.dp_size=4")
    process = start("--config", config_file, *SETTINGS, *layout, *rejoins)
    wait_for_step(run, 1)
    wait_until(lambda: [3] in [event["ranks"] for event in events(run, "drain")], "rank 3 does not leave")
    first = next(event for event in events(run, "drain") if event["ranks"] == [3])
    assert first["slow"] >= 4.0 and first["step_share"] <= 1.0

    def is_whole():
        changes = events(run, "membership")
        return len([each for change in changes for each in change["joined"]]) >= 2 and changes[-1]["live"] == 4

    wait_until(is_whole, "they do not come back")
    wait_for_step(run, len(metrics(run)) + 3)
    out = stop(process)
    assert first["text"] in out and "(pp0 dp3 tp0) has left" in out
    assert {each["rank"] for change in events(run, "membership") for each in change["who"]} >= {2, 3}
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    flags = ("elastic.balance=false", f"run.directory={undisturbed}")
    process = start("--config", config_file, *SETTINGS, *layout, *flags)
    wait_for_step(undisturbed, len(lines))
    stop(process)
    assert [line["loss"] for line in metrics(undisturbed)][: len(lines)] == [line["loss"] for line in lines]
