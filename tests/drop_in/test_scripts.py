"""Users' scripts on real processes: alone and under torchrun, through deaths, returns and mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.elastic.drop_in.launch_script import JOIN_VARIABLE
from parallel3d.elastic.drop_in.script import use_own_gpu
from tests.support.processes import read_to_the_end, wait_for

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/support/loop_script.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


@dataclass(frozen=True)
class Ended:
    """The results of a script."""

    code: int
    out: str
    err: str
    lines: list[dict[str, Any]]
    weights: dict[int, dict[str, torch.Tensor]]

    @property
    def losses(self) -> dict[int, float | None]:
        return {line["step"]: line.get("loss") for line in self.lines if "event" not in line}

    @property
    def changes(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == "membership"]


def start_script(
    directory: Path, spec: dict[str, Any], *, launcher: Sequence[str] = (), joins: bool = False
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), str(directory), json.dumps({"num_workers": 1, **spec})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({JOIN_VARIABLE: "1"} if joins else {}),
        start_new_session=True,
    )


def run_script(directory: Path, *, torchrun: int | None = None, **spec: Any) -> Ended:
    launcher = [*TORCHRUN, str(torchrun)] if torchrun else []
    return read_script(directory, start_script(directory, spec, launcher=launcher))


def read_script(directory: Path, process: subprocess.Popen[str]) -> Ended:
    out, err = read_to_the_end(process)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    weights = {int(each.stem.split("-")[1]): torch.load(each) for each in directory.glob("weights-*.pt")}
    return Ended(code=process.returncode, out=out, err=err, lines=lines, weights=weights)


def assert_variables(directory: Path, *, places: dict[int, int], num_workers: int) -> None:
    """What scripts found in their environment; `places`: the first rank in the place of each worker."""
    for rank, place in places.items():
        found = json.loads((directory / f"variables-{rank}.json").read_text())
        own = {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": num_workers, "LOCAL_WORLD_SIZE": num_workers}
        assert found == {name: str(number) for name, number in own.items()}, rank


def assert_same_weights(ended: Ended, reference: dict[str, torch.Tensor]) -> None:
    for rank, weights in ended.weights.items():
        for name, value in weights.items():
            assert value.equal(reference[name]), f"rank {rank}, {name}"


@pytest.mark.full
def test_two_deaths_change_no_bit_of_a_script_with_dropout(tmp_path: Path) -> None:
    alone = run_script(tmp_path / "alone", epochs=4)
    ended = run_script(tmp_path / "killed", num_workers=4, epochs=4, kills={"3": 1, "5": 0})
    assert (ended.code, ended.err) == (0, ""), ended
    assert set(ended.weights) == {2, 3}
    assert_same_weights(ended, alone.weights[0])
    assert ended.losses == alone.losses and len(alone.losses) == 8
    assert [change["why"] for change in ended.changes] == [
        "lost rank 1: killed by SIGKILL in step 3",
        "lost rank 0: killed by SIGKILL in step 5",
    ]
    assert ended.out.count("is at the end of 4 epochs") == 1, "the lines of one worker are shown"


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("loop", ["plain", "steps"])
def test_a_lost_worker_comes_back_and_changes_no_bit(tmp_path: Path, loop: str) -> None:
    """The undisturbed run is that of an inner loop."""
    spec = dict(epochs=20, wait_at=5, step_s=0.5, loop=loop)
    alone = run_script(tmp_path / "alone", epochs=20)
    ended = run_script(tmp_path / "killed", num_workers=3, kills={"3": 1}, max_rejoins=3, **spec)
    assert (ended.code, ended.err) == (0, ""), ended
    assert set(ended.weights) == {0, 2, 3}
    assert_same_weights(ended, alone.weights[0])
    assert list(ended.losses) == list(alone.losses) and (loop == "plain" or ended.losses == alone.losses)
    joined = [[worker["rank"] for worker in change["joined"]] for change in ended.changes]
    assert joined == [[], [3]]


@pytest.mark.full
def test_a_lost_worker_comes_back_to_a_plain_loop(tmp_path: Path) -> None:
    """It passes over the epochs that are done, and has the weights of the others at the end."""
    spec = dict(epochs=12, loop="drop", kills={"4": 1}, max_rejoins=3, wait_at=6, step_s=0.5)
    ended = run_script(tmp_path / "run", num_workers=3, **spec)
    assert (ended.code, ended.err) == (0, ""), ended
    assert set(ended.weights) == {0, 2, 3}
    assert_same_weights(ended, ended.weights[0])
    steps = [line["step"] for line in ended.lines if "event" not in line]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 3 * 12, "an epoch of 64 samples has 3 to 4 steps"
    joined = [[worker["rank"] for worker in change["joined"]] for change in ended.changes]
    assert joined == [[], [3]]


FAULTS = [
    pytest.param(sums, seed, marks=() if (sums, seed) == ("exact", 1) else pytest.mark.full)
    for sums in ("exact", "float")
    for seed in (1, 2, 3)
]


@pytest.mark.sample(1, rest=2)
@pytest.mark.parametrize("sums, seed", FAULTS)
def test_two_deaths_of_four_and_a_return_end_where_no_fault_does(tmp_path: Path, sums: str, seed: int) -> None:
    """In a loop as in a script for DistributedDataParallel."""
    spec: dict[str, Any] = dict(num_workers=4, epochs=20, sums=sums, seed=seed, loop="plain")
    calm = run_script(tmp_path / "calm", **spec)
    faults = dict(kills={"3": 1, "36": 0}, max_rejoins=1, wait_at=5, step_s=0.5)
    ended = run_script(tmp_path / "faults", **spec, **faults)
    assert (calm.code, ended.code, ended.err) == (0, 0, ""), ended
    assert set(calm.weights) == {0, 1, 2, 3}
    assert {2, 3, 4} <= set(ended.weights)
    for weights in ended.weights.values():
        for name, value in weights.items():
            torch.testing.assert_close(value, calm.weights[0][name], rtol=0, atol=0 if sums == "exact" else 1e-6)
    assert sorted(ended.losses) == list(range(1, 41))
    assert_variables(tmp_path / "faults", places={0: 0, 1: 1, 2: 2, 3: 3, 4: 1}, num_workers=4)
    lost = [change["why"].partition(":")[0] for change in ended.changes if not change["joined"]]
    assert lost == ["lost rank 1", "lost rank 0"]


def test_a_worker_joins_from_another_shell(tmp_path: Path) -> None:
    """The undisturbed run has one worker."""
    alone = run_script(tmp_path / "alone", epochs=20)
    directory = tmp_path / "run"
    spec = dict(num_workers=2, max_workers=3, epochs=20, wait_at=3, step_s=0.5)
    first = start_script(directory, spec)
    wait_for((directory / ".coordinator").exists, "the coordinator's address")
    second = start_script(directory, spec, joins=True)
    ended = read_script(directory, first)
    out, err = read_to_the_end(second)
    assert (ended.code, ended.err) == (0, ""), ended
    assert (second.returncode, err) == (0, ""), (out, err)
    assert set(ended.weights) == {0, 1, 2}
    assert_same_weights(ended, alone.weights[0])
    assert ended.losses == alone.losses
    assert [[worker["rank"] for worker in change["joined"]] for change in ended.changes] == [[2]]


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("loop", ["steps", "plain", "drop"])
def test_a_script_runs_under_torchrun(tmp_path: Path, loop: str) -> None:
    ended = run_script(tmp_path / "run", torchrun=3, epochs=3, kills={"2": 1}, loop=loop)
    assert ended.code == 0, ended
    assert set(ended.weights) == {0, 2}
    assert_same_weights(ended, ended.weights[0])
    assert len(ended.changes) == 1
    assert_variables(tmp_path / "run", places={0: 0, 1: 1, 2: 2}, num_workers=3)


@pytest.mark.full
def test_a_worker_comes_back_under_torchrun(tmp_path: Path) -> None:
    spec = dict(epochs=20, kills={"2": 1}, max_rejoins=1, wait_at=3, step_s=0.5)
    ended = run_script(tmp_path / "run", torchrun=2, num_workers=2, **spec)
    assert ended.code == 0, ended
    assert set(ended.weights) == {0, 2}
    assert_variables(tmp_path / "run", places={0: 0, 1: 1, 2: 1}, num_workers=2)


@pytest.mark.parametrize(("local_rank", "num_gpus", "chosen"), [(1, 4, [1]), (3, 2, [1]), (2, 1, [0]), (1, 0, [])])
def test_a_worker_has_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, num_gpus: int, chosen: list[int]
) -> None:
    """One of several, one of too few, the only one that a launcher shows it, or none."""
    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    use_own_gpu(local_rank)
    assert used == chosen


@pytest.mark.full
def test_a_mistake_of_the_script_ends_the_run_with_its_message(tmp_path: Path) -> None:
    ended = run_script(tmp_path / "run", num_workers=2, fail=1)
    assert ended.code == 1
    assert "rank 1 (pp0 dp1 tp0), step 2: ValueError: a mistake of the script" in ended.err
