"""parallel3d.train: the command's run, seen from Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from parallel3d.errors import RunFailed, UserError
from tests.support.launch_runs import STARTED, child_of, children_of, finish, metrics, name_of, start, wait_for_step

ROOT = Path(__file__).parents[2]
Json = dict[str, Any]


class Recorder(parallel3d.Callback):
    """Notes what is called, in which thread."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.changes: list[Json] = []
        self.threads: set[int] = set()

    def on_start(self, run_folder: Path) -> None:
        self.calls.append(("start", (run_folder / "config.json").exists()))

    def on_step(self, line: Json) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(line["step"])

    def on_evaluation(self, line: Json) -> None:
        self.calls.append(("evaluation", line["step"]))

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.calls.append(("checkpoint", step, (path / "index.json").exists()))

    def on_membership_change(self, line: Json) -> None:
        self.changes.append(line)

    def on_end(self, result: parallel3d.TrainResult) -> None:
        self.calls.append(("end", result.exit_code))


def losses_of(result: parallel3d.TrainResult) -> list[float]:
    return [line["loss"] for line in result.metrics]


@pytest.mark.slow
def test_it_is_the_commands_run_and_tells_callbacks(tiny: Json, tmp_path: Path, capsys: Any) -> None:
    recorder, seen = Recorder(), []
    result = parallel3d.train(tiny, ["run.seed=3"], callbacks=[recorder, seen.append])
    assert recorder.threads == {threading.get_ident()}
    steps = [call for call in recorder.calls if isinstance(call, int)]
    assert steps == [line["step"] for line in seen] == list(range(1, 7))
    assert seen == result.metrics and result.config["run"]["seed"] == 3
    others = [call for call in recorder.calls if not isinstance(call, int)]
    assert others[0] == ("start", True) and others[-1] == ("end", 0) and ("evaluation", 6) in others
    assert [call for call in others if call[0] == "checkpoint"] == [("checkpoint", 3, True), ("checkpoint", 6, True)]
    assert result.exit_code == 0 and result.final_step == 6 and result.final_loss == seen[-1]["loss"]
    assert [path.name for path in result.checkpoints] == ["step-00000003", "step-00000006"]
    assert {event["event"] for event in result.events} >= {"started", "evaluation", "ended"}
    assert "final loss" in capsys.readouterr().out

    again = parallel3d.train(result.config, {"run.directory": str(tmp_path / "two")}, quiet=True)
    assert losses_of(again) == losses_of(result)
    assert again.checkpoint_directory == tmp_path / "two" / "checkpoints"
    assert [path.exists() for path in result.checkpoints] == [True, True]

    file = tmp_path / "same.json"
    file.write_text(json.dumps(result.config | {"run": result.config["run"] | {"directory": str(tmp_path / "three")}}))
    code, _, error = finish(start("--config", file))
    assert code == 2 and "checkpoint.directory" in error and f"the run in {result.run_folder}" in error
    assert [path.exists() for path in result.checkpoints] == [True, True] and not (tmp_path / "three").exists()
    assert finish(start("--config", file, "run.resume=auto", "run.num_steps=7"))[0] == 0
    assert [line["step"] for line in metrics(tmp_path / "three")] == [7]


def test_importing_the_package_loads_nothing_else() -> None:
    """Neither torch nor a part of its own."""
    code = "import sys, parallel3d; print(sorted(name for name in sys.modules if name.startswith(('par', 'torch'))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "['parallel3d']", done.stderr


@pytest.mark.parametrize(
    "change,words",
    [
        ({"run": {"num_stepps": 3}}, "run.num_stepps"),
        ({"data": {"sources": ["no-such-folder"]}}, "no-such-folder"),
    ],
    ids=["unknown-field", "missing-data"],
)
def test_a_mistake_is_an_exception(tiny: Json, change: Json, words: str) -> None:
    """Found by the caller's process, or by the command's."""
    for section, values in change.items():
        tiny[section] = {**tiny[section], **values}
    with pytest.raises(UserError, match=words):
        parallel3d.train(tiny, quiet=True)


def test_what_json_can_not_hold(tiny: Json) -> None:
    with pytest.raises(UserError, match="workers can't import"):
        parallel3d.train(tiny | {"description": lambda: None})
    with pytest.raises(UserError, match="is a list of texts"):
        parallel3d.train(tiny, "run.num_steps=3")


def test_a_callback_by_name(tiny: Json, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(UserError, match=r"mine.py, line 2.*ZeroDivisionError"):
        parallel3d.train(tiny, callbacks=[f"{tmp_path / 'mine.py'}:Mine"])
    (tmp_path / "other.py").write_text("class Mine:\n    def __init__(self, patience): ...\n")
    with pytest.raises(UserError, match=r"callbacks .*other.py, line 1: .* no arguments, and Mine\(patience\) takes"):
        parallel3d.train(tiny, callbacks=[f"{tmp_path / 'other.py'}:Mine"])


@pytest.mark.slow
@pytest.mark.full
def test_a_callback_ends_the_run(tiny: Json) -> None:
    """By StopTraining with a result and a checkpoint, by any other exception with that one."""
    tiny["run"]["num_steps"] = 5000

    def stop(line: Json) -> None:
        if line["step"] >= 5:
            raise parallel3d.StopTraining

    result = parallel3d.train(tiny, callbacks=[stop], quiet=True)
    assert result.exit_code == 128 + signal.SIGINT and 5 <= result.final_step < 5000
    assert result.checkpoints[-1].name == f"step-{result.final_step:08}"
    with pytest.raises(ZeroDivisionError):
        parallel3d.train(tiny, callbacks=[lambda line: 1 / 0], quiet=True)
    assert not [pid for pid in children_of(os.getpid()) if name_of(pid).startswith("p3d")]


@pytest.mark.slow
@pytest.mark.full
def test_a_slow_callback_delays_no_step(tiny: Json) -> None:
    """Each callback sleeps for a second; the run does not wait, and every one of its 6 steps is reported."""
    seen = []

    def slow(line: Json) -> None:
        seen.append(line["step"])
        time.sleep(1.0)

    result = parallel3d.train(tiny, callbacks=[slow], quiet=True)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert sum(line["step_s"] for line in result.metrics[1:]) < 4.0  # 5 s if a step waited for its callback


@pytest.mark.slow
@pytest.mark.full
def test_a_worker_is_killed_and_an_unfinished_run_raises(tiny: Json) -> None:
    tiny["parallel"], tiny["run"]["num_steps"] = {"dp_size": 2}, 12

    class Killer(Recorder):
        def on_step(self, line: Json) -> None:
            super().on_step(line)
            if line["step"] == 4:
                below = [pid for command in children_of(os.getpid()) for pid in children_of(command)]
                (guardian,) = [pid for pid in below if name_of(pid) == "p3d-guardian"]
                (worker,) = [pid for pid in children_of(guardian) if name_of(pid) == "p3d-rank-1"]
                os.kill(worker, signal.SIGKILL)

    tiny["elastic"] = {"max_rejoins": 0}
    killer = Killer()
    result = parallel3d.train(tiny, {"run.num_steps": 300}, callbacks=[killer], quiet=True)
    assert result.final_step == 300 and [line["lost"] for line in killer.changes] == [1]

    tiny["parallel"] = {"pp_size": 2}
    with pytest.raises(RunFailed) as failed:
        parallel3d.train(tiny, {"run.num_steps": 300, "restart.max_restarts": 0}, callbacks=[Killer()], quiet=True)
    assert failed.value.exit_code == 3 and failed.value.result.final_step >= 4


SCRIPT = """
import sys, threading, time, torch, parallel3d
torch.ones(8) @ torch.ones(8)
threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
{guard}
    result = parallel3d.train(sys.argv[1], quiet=True)
    print(result.final_step)
"""


@pytest.mark.slow
@pytest.mark.full
def test_a_caller_that_is_killed_takes_its_run_along(tiny: Json, tmp_path: Path) -> None:
    """One that has torch and threads, as a notebook has."""
    script, config = tmp_path / "script.py", tmp_path / "tiny.json"
    tiny["run"]["num_steps"] = 5000
    config.write_text(json.dumps(tiny, default=str))
    script.write_text(SCRIPT.format(guard="if __name__ == '__main__':"))
    caller = subprocess.Popen([sys.executable, script, config], env={**os.environ, "PYTHONPATH": str(ROOT)})
    STARTED.append(caller)
    try:
        wait_for_step(tmp_path / "run", 3)
        (command,) = children_of(caller.pid)
        guardian = child_of(command, "guardian")
    finally:
        caller.kill()
        caller.wait(60)
    deadline = time.monotonic() + 300
    while name_of(guardian) == "p3d-guardian":
        assert time.monotonic() < deadline, "the run goes on without its caller"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.full
def test_under_torchrun_each_process_guards_its_worker(tiny: Json, tmp_path: Path) -> None:
    """Callbacks are called in the process of rank 0; both have the result."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, parallel3d\n"
        "if __name__ == '__main__':\n"
        "    seen = []\n"
        "    result = parallel3d.train(json.loads(sys.argv[1]), callbacks=[seen.append], quiet=True)\n"
        "    text = f'rank {os.environ[\"RANK\"]}: {len(seen)} of {result.final_step}\\n'\n"
        "    os.write(1, text.encode())\n"
    )
    tiny["parallel"] = {"pp_size": 2}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), json.dumps(tiny, default=str)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert {"rank 0: 6 of 6", "rank 1: 0 of 6"} <= set(done.stdout.splitlines())
