"""A run on a blend, its tokeniser processes killed, and a worker with its own: the same run, nothing left behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.launch_runs import children_of, finish, metrics, name_of, start, wait_for_step, workers_of

pytestmark = pytest.mark.slow
NUM_STEPS = 16
SWITCH = 8 * 32 * 5 + 100
"""Within the sixth step."""


def blend():
    """Two sources of the standard library."""
    library = Path(os.__file__).parent
    sources = {"a": [str(library / "a*.py")], "c": [str(library / "c*.py")]}
    stages = [{"weights": {"a": 0.75, "c": 0.25}}, {"from_token": SWITCH, "weights": {"a": 0.1, "c": 0.9}}]
    return {"sources": sources, "stages": stages}


def arguments(config_file, run, *more):
    overrides = {"run.num_steps": NUM_STEPS, "run.directory": run, "data.sources": [], "data.blend": blend()}
    overrides |= {"run.evaluate_every": None, "checkpoint.save_at_end": False}
    changes = (f"{name}={json.dumps(value, default=str)}" for name, value in overrides.items())
    return ["--config", config_file, *changes, *more]


@pytest.mark.full
def test_killed_tokenisers_and_a_killed_worker_change_nothing(config_file, tmp_path):
    code, out, err = finish(start(*arguments(config_file, tmp_path / "undisturbed")))
    assert code == 0, out + err
    assert out.count("data.blend is now") == 1 and "step 6: data.blend is now" in out
    waits = {"rank": 3, "step": 4, "kind": "sleep", "seconds": 2}
    faults = json.dumps([waits, {"rank": 0, "step": 9, "phase": "load"}])
    run = tmp_path / "run"
    process = start(*arguments(config_file, run, "data.num_processes=1", f"elastic.faults={faults}"))
    wait_for_step(run, 3)
    below = [pid for worker in workers_of(process.pid) for pid in children_of(worker)]
    tokenisers = [pid for pid in below if name_of(pid) != "p3d-memory"]
    for pid in tokenisers:
        os.kill(pid, signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0, out + err
    assert len(tokenisers) == 2, "one for each rank of the first stage"
    assert "tokeniser process" in out and "SIGKILL" in out and "lost rank 0" in out
    losses, expected = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "undisturbed"))
    assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == NUM_STEPS
    assert all("data_wait_s" in line for line in metrics(run)[:3])
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(run) in _read(path)]
    assert left == []


def _read(path):
    try:
        return path.read_text()
    except OSError:
        return ""
