"""launch/train.py on a GPU, or on several ranks that share one: a CPU's losses, a kill, and bits that do not change.

Without a GPU the CPU stands in, so that these tests are known to run.
"""

import os
import signal

import pytest

from tests.support.kernel_forms import DEVICE
from tests.support.launch_runs import finish, metrics, start, wait_for_change, wait_for_step, workers_of

ON_GPU = DEVICE == "cuda"
pytestmark = [pytest.mark.slow, pytest.mark.gpu if ON_GPU else pytest.mark.full]
SHARED = "cuda_shared" if ON_GPU else "cpu"
CASES = [
    ("cuda", dict(tp=1, pp=1, dp=1)),
    ("cuda_shared", dict(tp=2, pp=2, dp=1)),
    ("cuda_shared", dict(tp=1, pp=2, dp=2)),
]
KILL = '[{"rank": 3, "step": 5, "phase": "backward"}]'


def steps_of(config_file, run, *arguments):
    """The lines of the steps that a run of its own makes in the folder `run`."""
    code, out, err = finish(start("--config", config_file, f"run.directory={run}", *arguments))
    assert code == 0, out + err
    return metrics(run)


@pytest.mark.parametrize("device, sizes", CASES if ON_GPU else [("cpu", dict(tp=1, pp=1, dp=1))], ids=str)
def test_a_gpu_trains_like_a_cpu(config_file, tmp_path, device, sizes):
    layout = [f"parallel.{axis}_size={size}" for axis, size in sizes.items()]
    ours, theirs = (
        [line["loss"] for line in steps_of(config_file, tmp_path / side, f"run.device={name}", *layout)]
        for side, name in (("ours", device), ("theirs", "cpu"))
    )
    assert ours == pytest.approx(theirs, rel=1e-3) and len(ours) == 12


def test_ranks_that_share_a_gpu_survive_a_kill(config_file, tmp_path):
    """Eight ranks: a tensor-parallel one dies, its replica goes, and the damaged pipeline continues."""
    sizes = [f"parallel.{axis}_size=2" for axis in ("tp", "pp", "dp")]
    process = start("--config", config_file, f"run.device={SHARED}", "run.num_steps=100000", *sizes)
    wait_for_step(tmp_path / "run", 3)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    wait_for_change(tmp_path / "run", 1)
    wait_for_step(tmp_path / "run", metrics(tmp_path / "run")[-1]["step"] + 3)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in out + err


def test_deterministic_runs_with_a_kill_and_a_resume_are_bitwise_the_undisturbed_one(config_file, tmp_path):
    """Four ranks in 2 x 2, exact sums: every step's loss, gradient norm and norms of weights and variances are equal,
    after one of four was killed in a step, and from a checkpoint on."""
    same = (f"run.device={SHARED}", "run.deterministic=true", "precision.sums=exact")

    def course(name, *arguments):
        lines = steps_of(config_file, tmp_path / name, *same, "checkpoint.every=8", *arguments)
        names = ("step", "loss", "grad_norm", "param_norm", "variance_norm")
        return [[line[name] for name in names] for line in lines]

    undisturbed = course("undisturbed")
    killed = course("killed", f"elastic.faults={KILL}")
    resumed = course("resumed", f"run.resume={tmp_path}/undisturbed/checkpoints/step-00000008")
    assert (tmp_path / "killed" / "metrics.jsonl").read_text().count('"event": "membership"') == 1
    assert killed == undisturbed and resumed == undisturbed[8:] and len(undisturbed) == 12
