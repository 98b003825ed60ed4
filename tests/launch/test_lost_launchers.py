"""A launcher that is killed takes all processes of its run along; one that is stopped delays only its own end."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.launch_runs import finish, metrics, start, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.full]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4")


def processes_of(run: Path) -> list[str]:
    """The names of the processes whose command line names the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(run) in (path / "cmdline").read_text():
                found.append((path / "comm").read_text().strip())
        except OSError:
            continue
    return found


def wait_until_gone(run: Path, but: int = 0) -> None:
    deadline = time.monotonic() + 300
    while len(left := processes_of(run)) > but:
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.05)


def test_a_killed_torchrun_leaves_no_process(config_file, tmp_path):
    process = start("--config", config_file, "run.num_steps=100000", launcher=TORCHRUN)
    wait_for_step(tmp_path / "run", 3)
    # stub, guardian, worker and its memory holder of each rank, and the coordinator
    assert len(processes_of(tmp_path)) == 1 + 4 * 4 + 1
    process.kill()
    process.communicate()
    wait_until_gone(tmp_path)


def test_a_killed_stub_without_a_launcher_leaves_no_process(config_file, tmp_path):
    process = start("--config", config_file, "run.num_steps=100000")
    wait_for_step(tmp_path / "run", 3)
    assert len(processes_of(tmp_path)) == 1 + 2 + 4 * 2
    process.kill()
    process.communicate()
    wait_until_gone(tmp_path)


def test_a_stopped_torchrun_delays_only_its_own_end(config_file, tmp_path):
    process = start("--config", config_file, "run.num_steps=40", launcher=TORCHRUN)
    wait_for_step(tmp_path / "run", 3)
    os.kill(process.pid, signal.SIGSTOP)
    wait_for_step(tmp_path / "run", 40)
    os.kill(process.pid, signal.SIGCONT)
    code, out, err = finish(process)
    assert code == 0 and "Traceback" not in out + err and len(metrics(tmp_path / "run")) == 40, out + err
    wait_until_gone(tmp_path)
