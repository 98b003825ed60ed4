"""Real gloo processes and sockets train like one process."""

import subprocess
import sys
from pathlib import Path

import cells
import pytest

from parallel3d.trainer.verify import largest_difference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All process cells, run once."""
    folder = tmp_path_factory.mktemp("cells")
    done = subprocess.run(
        [sys.executable, cells.__file__, str(folder)],
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def one_process(name):
    """The same run on one rank."""
    sections = {**cells.PROCESS_CELLS[name], "parallel": {}}
    return cells.run_cell_in_threads(steps=cells.cell_steps(name), **sections)


def policy(name):
    return cells.PROCESS_CELLS[name].get("precision", {}).get("policy", "fp64")


@pytest.mark.parametrize("name", [n for n in cells.PROCESS_CELLS if policy(n) == "fp64"])
def test_fp64_processes_equal_one_process(folder, name):
    """As in threads: only the order of sums differs, some 1e-15 a step, magnified by AdamW near zero."""
    ours, theirs = cells.load_process_cell(folder, name), one_process(name)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-10)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-10)
    assert ours.evaluation == pytest.approx(theirs.evaluation, rel=1e-10)
    for mine, yours in ((ours.gradients, theirs.gradients), (ours.weights, theirs.weights)):
        difference, where = largest_difference(mine, yours)
        assert difference < 1e-10, where


@pytest.mark.parametrize("name,tolerance", [("fp32-tp2-pp2-dp2", 1e-5), ("bf16-tp2-dp2-sp", 1e-2)])
def test_losses_in_narrower_formats(folder, name, tolerance):
    """fp32 has 24 bits, bf16 8; layouts round at different places."""
    ours, theirs = cells.load_process_cell(folder, name), one_process(name)
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)


def test_eight_processes_follow_one_for_fifty_steps(folder):
    """2 x 2 x 2 in fp32 on real text: rounding differences stay below 1e-4 of the loss for 50 steps."""
    ours, theirs = cells.load_process_cell(folder, "fifty-steps"), one_process("fifty-steps")
    assert len(ours.losses) == 50
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert theirs.losses[-1] < 0.8 * theirs.losses[0]


def test_threads_and_processes_are_the_same_run(folder):
    """Same layout, same kernels: only the transports differ, and the order in which they add."""
    ours = cells.load_process_cell(folder, "pp2-dp2")
    threads = cells.run_cell_in_threads(**cells.PROCESS_CELLS["pp2-dp2"])
    assert ours.losses == pytest.approx(threads.losses, rel=1e-14)
    assert [entry.cursors for entry in ours.entries] == [entry.cursors for entry in threads.entries]
