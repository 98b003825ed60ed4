"""Worlds of real processes: started, killed, stopped, under torchrun; no process is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.member_processes import free_port
from tests.support.process_worlds import start
from tests.support.processes import DEADLINE_S, alive, pids, read_to_the_end, wait_for

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def wait_for_step(directory: Path) -> None:
    metrics = directory / "metrics.jsonl"
    wait_for(lambda: len(list(directory.glob("pid-*"))) == 2 and metrics.exists() and metrics.stat().st_size, "a step")


def end(process: subprocess.Popen[str], directory: Path) -> tuple[int, str, str]:
    """Returns (exit code, stdout, stderr) of a world that is about to end; no process of it may be left."""
    out, err = read_to_the_end(process)
    wait_for(lambda: not any(alive(pid) for pid in pids(directory)), "the last process to be gone")
    return process.returncode, out, err


def test_a_good_run_exchanges_values_and_leaves_its_folder(tmp_path):
    code, out, err = end(start("good", tmp_path), tmp_path)
    assert (code, err) == (0, "")
    assert "nearly there" in out and "loss / unigram entropy  0.250" in out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "event" not in line] == [1, 2, 3]
    assert json.loads((tmp_path / "summary.json").read_text())["final_loss"] == 1.0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for rank in (0, 1):
        assert (tmp_path / "logs" / f"rank-{rank}.log").read_text() == f"hello from rank {rank} of 2\n"


def test_the_largest_values_travel_through_the_guardian(tmp_path):
    process = start("large", tmp_path)
    assert read_to_the_end(process)[1] == "" and process.returncode == 0


def test_a_killed_worker_is_named_and_ends_the_run(tmp_path):
    code, _, err = end(start("killed", tmp_path), tmp_path)
    log = tmp_path / "logs" / "rank-1.log"
    assert code == 3
    assert err == f"rank 1 (pp1 dp0 tp0) was killed by SIGKILL in step 7\n  log: {log}\n"
    assert "rank 0 ends: rank 1 (pp1 dp0 tp0) was killed by SIGKILL" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_the_first_cause_is_told_once_and_its_traceback_is_in_the_log(tmp_path):
    code, out, err = end(start("failing", tmp_path, ABORT_GRACE_S=str(DEADLINE_S)), tmp_path)
    log = tmp_path / "logs" / "rank-1.log"
    assert code == 2
    assert err == f"rank 1 (pp1 dp0 tp0), step 12: DataError: corpus.txt is empty\n  log: {log}\n"
    assert "Traceback" in log.read_text() and "Traceback" not in out
    assert "ConnectionResetError" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_a_worker_that_does_not_leave_is_killed(tmp_path):
    started = time.monotonic()
    code, _, err = end(start("stubborn", tmp_path), tmp_path)
    assert code == 1 and err.startswith("rank 0 (pp0 dp0 tp0), before the first step: ValueError: a defect\n")
    assert "rank 1" not in err  # the guardian has killed it: no evidence of a failure
    assert time.monotonic() - started > 1.0


def test_a_workers_own_exit_code_is_the_runs(tmp_path):
    code, _, err = end(start("exit_code", tmp_path), tmp_path)
    assert code == 9 and err.startswith("rank 1 ended with exit code 9")


@pytest.mark.sample(1)
@pytest.mark.parametrize("number, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_lets_the_workers_finish(tmp_path, number, expected):
    process = start("endless", tmp_path)
    wait_for_step(tmp_path)
    os.killpg(process.pid, number)  # as a terminal does: launcher and workers alike
    code, out, err = end(process, tmp_path)
    assert code == expected
    assert out.count("stopping after this step; press Ctrl-C again to stop at once") == 1
    assert err.startswith("stopped after step ")


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    process = start("deaf", tmp_path, STOP_GRACE_S=str(2 * DEADLINE_S))
    wait_for_step(tmp_path)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping" in (tmp_path / "metrics.jsonl").read_text(), "the first to be heard")
    process.send_signal(signal.SIGINT)
    code, _, err = end(process, tmp_path)
    assert code == 130 and err == "stopped after step 1\n"


@pytest.mark.full
def test_workers_that_do_not_heed_a_stop_are_killed(tmp_path):
    process = start("deaf", tmp_path)
    wait_for_step(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert end(process, tmp_path)[0] == 143


def test_workers_die_with_a_launcher_that_is_killed(tmp_path):
    process = start("deaf", tmp_path)
    wait_for_step(tmp_path)
    assert len(pids(tmp_path)) == 4 and all(alive(pid) for pid in pids(tmp_path))
    process.kill()
    assert end(process, tmp_path)[0] == -signal.SIGKILL


def test_process_groups_meet_through_the_control_channel(tmp_path):
    code, _, err = end(start("reduced", tmp_path), tmp_path)
    assert (code, err) == (0, "")
    for rank in range(3):
        assert (
            tmp_path / "logs" / f"rank-{rank}.log"
        ).read_text() == "generation0/world: 111\ngeneration1/world: 111\n"


def test_ranks_that_wait_for_a_group_leave_when_a_member_fails(tmp_path):
    code, _, err = end(start("half_built", tmp_path), tmp_path)
    assert code == 2 and "rank 2 (pp2 dp0 tp0), before the first step: DataError: no shard for rank 2" in err
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert "rank 0 ends: rank 2 (pp2 dp0 tp0)" in log  # not killed after its grace


def test_under_torchrun_the_guardians_meet_and_stay_light(tmp_path):
    code, out, err = end(start("light_guardian", tmp_path, launcher=TORCHRUN), tmp_path)
    assert code == 0, err
    assert out.count("run folder") == 1
    assert {file.name for file in (tmp_path / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}


@pytest.mark.full
def test_under_torchrun_a_killed_worker_fails_every_guardian(tmp_path):
    code, _, err = end(start("killed", tmp_path, launcher=TORCHRUN), tmp_path)
    assert code != 0
    assert err.count("rank 1 (pp1 dp0 tp0) was killed by SIGKILL in step 7") == 1
    assert err.count("exitcode  : 3") >= 1  # torchrun's own report


@pytest.mark.full
def test_a_launcher_without_a_store_leaves_the_port_to_rank_0(tmp_path):
    """As under DeepSpeed's launcher; also: the coordinator may come up after the other ranks."""
    port = free_port()
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    second = start("good", tmp_path, RANK="1", LOCAL_RANK="1", **world)
    time.sleep(0.5)
    first = start("good", tmp_path, RANK="0", LOCAL_RANK="0", **world)
    assert end(first, tmp_path)[0] == 0 and end(second, tmp_path)[0] == 0
    assert "hello from rank 1" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_port_in_use_is_one_message(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
        code, _, err = end(start("good", tmp_path, RANK="0", LOCAL_RANK="0", **world), tmp_path)
    assert code == 2
    assert err.startswith(f"can't listen at port {port} (") and err.count("\n") == 1


@pytest.mark.full
def test_an_unreachable_coordinator_is_one_message(tmp_path):
    port = free_port()
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CONNECT_S": "1.5"}
    code, _, err = end(start("good", tmp_path, RANK="1", LOCAL_RANK="1", **world), tmp_path)
    assert code == 2
    assert err.startswith(f"rank 1: could not reach the run's coordinator at 127.0.0.1:{port} within 1.5 s")
    assert err.count("\n") == 1


def test_a_rank_that_never_starts_is_named(tmp_path):
    """Rank 1 of two is not started at all."""
    port = free_port()
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "START_S": "1"}
    code, _, err = end(start("endless", tmp_path, RANK="0", LOCAL_RANK="0", **world), tmp_path)
    assert code == 3 and err == "rank 1 did not start within 1 s\n"


def test_a_folder_that_can_not_be_written_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = end(start("good", tmp_path / "file"), tmp_path)
    assert code == 2 and out == ""
    assert err.startswith("can't write the run folder") and err.count("\n") == 1


def test_training_does_not_import_torch_to_print_its_configuration(tmp_path):
    """An argument that is not an override is an error that names it."""
    root = Path(__file__).parents[2]
    config = root / "configs" / "hlat_7b.json"
    script = "import sys; from parallel3d.commands.train import main; "
    script += f"code = main(['--local_rank=0', '--config', {str(config)!r}, 'run.num_steps=5', '--print-config'])"
    script += "; assert 'torch' not in sys.modules; sys.exit(code)"
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=DEADLINE_S)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["run"]["num_steps"] == 5
    command = [sys.executable, root / "launch" / "train.py", "--config", config]
    answer = subprocess.run([*command, "num_steps"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert answer.returncode == 2 and "unknown argument: num_steps" in answer.stderr
    answer = subprocess.run([*command, "run.num_step=5"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert answer.returncode == 2 and "run.num_step" in answer.stderr and "Traceback" not in answer.stderr
