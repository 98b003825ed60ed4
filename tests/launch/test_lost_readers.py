"""Whatever reads a run's output goes away in the middle of it: nothing that the run records is lost."""

import json
import os
import signal

import pytest

from tests.support.launch_runs import metrics, start, wait_for_change, wait_for_step, workers_of

pytestmark = pytest.mark.slow
LAUNCHERS = {
    "alone": (),
    "torchrun": ("-m", "torch.distributed.run", "--nproc_per_node", "4", "--standalone"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_without_a_reader_the_run_goes_on_and_says_so(config_file, tmp_path, launcher):
    process = start("--config", config_file, launcher=LAUNCHERS[launcher])
    wait_for_step(tmp_path / "run", 1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 0, err
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == 0
    assert err.count("standard output has lost its reader") == 1 and "Traceback" not in err


def test_nobody_hears_of_a_worker_that_dies(config_file, tmp_path):
    """Both streams are closed; the guardian's and the coordinator's words are lost, the worker comes back."""
    run, flags = tmp_path / "run", ("run.num_steps=1000000", "elastic.max_rejoins=1")
    process = start("--config", config_file, *flags)
    wait_for_step(run, 1)
    process.stdout.close()
    process.stderr.close()
    os.kill(workers_of(process.pid)[3], signal.SIGKILL)
    wait_for_change(run, 2)
    wait_for_step(run, len(metrics(run)) + 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    steps = [line["step"] for line in metrics(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert json.loads((run / "summary.json").read_text())["last_step"] == steps[-1]
