"""A long evaluation, for which all other workers wait, is not taken for a failure; the same wait in a step is."""

import json

import pytest

from tests.support.launch_runs import finish, metrics, start

pytestmark = pytest.mark.slow
WATCHDOG_S = 8.0
SETTINGS = ("precision.sums=exact", f"elastic.watchdog_timeout.min_s={WATCHDOG_S}", "elastic.watchdog_timeout.max_s=8")


def changes(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["why"] for line in lines if line.get("event") == "membership"]


@pytest.mark.full
@pytest.mark.parametrize(("phase", "is_lost"), [("evaluate", False), ("forward", True)])
def test_a_worker_that_takes_three_times_the_timeout(config_file, tmp_path, phase, is_lost):
    """Rank 0, which is the leader, in the evaluation after step 6 or in a step after it."""
    sleep = {"rank": 0, "step": 6, "phase": phase, "kind": "sleep", "seconds": 3 * WATCHDOG_S}
    faults = [sleep if phase == "evaluate" else {**sleep, "step": 10, "seconds": 60 * WATCHDOG_S}]
    settings = (*SETTINGS, f"elastic.faults={json.dumps(faults)}")
    code, out, err = finish(start("--config", config_file, *settings))
    assert code == 0, out + err
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))
    assert [why.startswith("lost rank 0: stuck for ") for why in changes(tmp_path / "run")] == [True] * is_lost
