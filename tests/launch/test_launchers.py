"""The plain commands of other launchers: torchrun, deepspeed, and what srun and mpirun leave in the environment.

Under each, workers are killed by real signals, the leader among them, and the run ends with exit code 0 and the losses
of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.commands import train
from tests.support.launch_runs import PATIENCE_S, STARTED, metrics, wait_for_change, wait_for_step
from tests.support.member_processes import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "launch" / "train.py")
BIN = Path(sys.executable).parent
NUM_STEPS = 5
LOSS_TOLERANCE = 1e-5
"""fp32 on another layout from the loss on: sums in another order."""

CELLS = {
    "the leader in a backward pass": [dict(rank=0, step=2, phase="backward")],
    "a last stage in the all-reduce": [dict(rank=3, step=3, phase="all_reduce")],
    "one of each stage": [dict(rank=1, step=2, phase="update"), dict(rank=2, step=4, phase="forward")],
}
"""2 stages x 2 replicas; faults kill the process by SIGKILL."""
OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in CELLS if name != "one of each stage"]


class Folder:
    """Configurations that differ in their faults, and their runs."""

    def __init__(self, path: Path):
        self.path = path
        sources = sorted(Path(os.__file__).parent.glob("[a-b]*.py"))
        (path / "text.txt").write_text("\n".join(source.read_text(errors="replace") for source in sources))

    def config(self, name: str, faults: list[dict]) -> Path:
        model = dict(vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        config = {
            "model": model,
            "parallel": {"pp_size": 2, "dp_size": 2},
            "batch": {"global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 16},
            "optimizer": {"learning_rate": 1e-2},
            "data": {"sources": [str(self.path / "text.txt")], "cache_directory": str(self.path / "cache")},
            "monitor": {"charts": False},
            "elastic": {"faults": faults, "max_rejoins": 0},
            "run": {
                "num_steps": NUM_STEPS,
                "threads_per_rank": 1,
                "evaluate_batches": 1,
                "directory": str(self.path / name),
                "timeout_s": 300.0,
            },
        }
        file = self.path / f"{name}.json"
        file.write_text(json.dumps(config))
        return file

    def losses(self, name: str) -> list[float]:
        lines = [json.loads(line) for line in (self.path / name / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "event" not in line]
        assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1)), "a step is missing, or recorded twice"
        return [line["loss"] for line in steps] + [line["loss"] for line in lines if line.get("event") == "evaluation"]

    def check_run(self, name: str, faults: list[dict]) -> None:
        changes = (self.path / name / "metrics.jsonl").read_text().count('"event": "membership"')
        assert changes == len(faults)
        assert self.losses(name) == pytest.approx(self.losses("undisturbed"), rel=LOSS_TOLERANCE)
        assert json.loads((self.path / name / "summary.json").read_text())["exit_code"] == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Folder:
    """With the undisturbed run in it, started plainly."""
    folder = Folder(tmp_path_factory.mktemp("launchers"))
    code, out = run([sys.executable, TRAIN, "--config", str(folder.config("undisturbed", []))])
    assert code == 0, out
    return folder


def environment(**more: str) -> dict[str, str]:
    """This process's, without traces of a launcher."""
    traces = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|OMPI_|PMI_|PMIX_|TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not traces.match(name)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run(command: list[str], **variables: str) -> tuple[int, str]:
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.sample(1, rest=3)
@pytest.mark.parametrize("cell", ["one of each stage", *OTHERS])
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.full)])
def test_kills_under_the_plain_command(folder: Folder, launcher: str, cell: str):
    name = f"{launcher} {cell}".replace(" ", "-")
    command = {
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "4"],
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "4", "--master_port", str(free_port())],
    }[launcher]
    code, out = run([*command, TRAIN, "--config", str(folder.config(name, CELLS[cell]))], DS_ACCELERATOR="cpu")
    assert code == 0, out
    assert out.count("killed by SIGKILL") == len(CELLS[cell]) and out.count("final loss") == 1
    folder.check_run(name, CELLS[cell])


def test_the_other_ranks_of_a_host_wait_for_the_one_that_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A launcher that saw them end first would kill the first one before it has spoken."""
    waits: list[float] = []
    monkeypatch.setattr(train.time, "sleep", waits.append)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank, says_it, waited in (("0", True, []), ("1", False, [train.FIRST_RANK_S])):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert train.main(["--config", "quickstart", "run.num_steps=-1"]) == 2
        assert ("run.num_steps" in capsys.readouterr().err, waits) == (says_it, waited)


DEEPSPEED_JSON = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "activation_checkpointing": {"partition_activations": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 5, "warmup_num_steps": 2, "warmup_max_lr": 5e-3, "warmup_type": "linear"},
    },
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
    },
}
DEEPSPEED_FIELDS = {
    "batch": dict(global_batch_size=16, micro_batch_size=2, num_micro_batches=8, sequence_length=16),
    "parallel": dict(pp_size=2, dp_size=2, zero_stage=1, recompute="full"),
    "optimizer": dict(learning_rate=5e-3, beta2=0.95, weight_decay=0.1, max_grad_norm=0.5),
    "lr_schedule": dict(kind="linear", warmup_steps=2, decay_steps=5, min_ratio=0.0),
    "precision": dict(policy="bf16"),
    "run": dict(num_steps=NUM_STEPS),
}
"""What follows; pp_size, sequence_length and num_steps are the configuration's, which the file leaves out."""


@pytest.mark.full
def test_deepspeeds_command_with_its_json(folder: Folder):
    """What the file says replaces the configuration's fields; what it leaves out stays."""
    file = folder.path / "ds_config.json"
    file.write_text(json.dumps(DEEPSPEED_JSON))
    command = [str(BIN / "deepspeed"), "--num_gpus", "4", "--master_port", str(free_port()), TRAIN]
    words = ["--config", str(folder.config("with-json", [])), "--deepspeed", "--deepspeed_config", str(file)]
    code, out = run([*command, *words], DS_ACCELERATOR="cpu")
    ignored = "zero_optimization.overlap_comm, activation_checkpointing.partition_activations"
    assert code == 0 and out.count(f"no effect here: {ignored}") == 1, out
    resolved = json.loads((folder.path / "with-json" / "config.json").read_text())
    for section, fields in DEEPSPEED_FIELDS.items():
        assert {name: resolved[section][name] for name in fields} == fields
    steps = metrics(folder.path / "with-json")
    assert [step["sequence_length"] for step in steps] == [8, 8, 8, 16, 16]
    assert [step["lr"] for step in steps] == pytest.approx([2.5e-3, 5e-3, 1e-2 / 3, 5e-3 / 3, 0.0])
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    code, out = run([*command, *words], DS_ACCELERATOR="cpu")
    assert code != 0 and "zero_optimization.stage = 3: must be 0 or 1" in out and "Traceback" not in out


def slurm(rank: int, num_tasks: int = 4) -> dict[str, str]:
    """srun -N 2 --ntasks-per-node 2, both nodes being this one."""
    return {
        "SLURM_JOB_ID": str(free_port()),  # the port follows from it
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)" + ",1" * (num_tasks - 4),
        "SLURM_STEP_NODELIST": f"127.0.0.[1-{num_tasks // 2 + num_tasks % 2}]",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
    }


def open_mpi(rank: int) -> dict[str, str]:
    """mpirun -np 4 on one host."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": f"prterun-here-{os.getpid()}@1",
    }


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("variables", [slurm, open_mpi], ids=["srun", "mpirun"])
def test_processes_that_another_launcher_has_started(folder: Folder, variables):
    faults = CELLS["the leader in a backward pass"]
    config = folder.config(variables.__name__, faults)
    job = variables(0)
    processes = [
        subprocess.Popen(
            [sys.executable, TRAIN, "--config", str(config)],
            env=environment(**{**variables(rank), **{n: v for n, v in job.items() if n == "SLURM_JOB_ID"}}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    outs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], "\n".join(outs)
    assert "lost rank 0 (pp0 dp0 tp0): killed by SIGKILL in step 2" in outs[0] and "final loss" in outs[0]
    folder.check_run(variables.__name__, faults)


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
def test_a_task_more_than_the_grid_has_is_a_spare(folder: Folder):
    """srun -N 3 for a grid of two hosts: the fifth task takes the place of the one that is killed."""
    config = folder.config("spare", CELLS["the leader in a backward pass"])
    job = slurm(0)["SLURM_JOB_ID"]
    processes = [
        subprocess.Popen(
            [sys.executable, TRAIN, "--config", str(config), "elastic.spares=1", "run.num_steps=100000"],
            env=environment(**slurm(rank, 5) | {"SLURM_JOB_ID": job}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(5)
    ]
    STARTED.extend(processes)
    wait_for_step(folder.path / "spare", 1)
    wait_for_change(folder.path / "spare", 2)
    processes[1].send_signal(signal.SIGINT)
    outs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [130] * 5, "\n".join(outs)
    lines = (folder.path / "spare" / "metrics.jsonl").read_text().splitlines()
    loss, join = [json.loads(line) for line in lines if '"event": "membership"' in line]
    assert ([who["rank"] for who in loss["who"]], [who["rank"] for who in join["joined"]]) == ([0], [4])
    assert (join["live"], join["spare"], join["lost"]) == (4, 0, 0)
