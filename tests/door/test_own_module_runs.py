"""A user's own layers in real processes: what elasticity needs of them, and errors as the user sees them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from parallel3d.errors import UserError
from tests.extending import ademamix, eager_1f1b
from tests.support import own_llama
from tests.support.launch_runs import children_of, name_of

pytestmark = [pytest.mark.slow, pytest.mark.full]
Json = dict[str, Any]


def workers() -> dict[str, int]:
    """The workers of this process's run, by name."""
    found = {os.getpid()}
    for _ in range(3):  # command, guardian, worker
        found = {child for pid in found for child in children_of(pid)}
    return {name_of(pid): pid for pid in found}


def test_a_killed_worker_returns_and_changes_no_loss(tiny: Json) -> None:
    """Two stages of two replicas: the others redo the step, a new worker takes over the weights of the lost one; the
    same elements are dropped."""
    tiny["model"] |= {"module": own_llama.build_with_dropout, "num_hidden_layers": 4}
    tiny["parallel"] = {"pp_size": 2, "dp_size": 2, "bucket_mib": 0.03}
    tiny |= {"precision": {"policy": "fp64"}, "elastic": {"max_rejoins": 3}, "lr_schedule": {"decay_steps": 3000}}
    tiny["checkpoint"] = {"save_at_end": False}
    changes: list[Json] = []

    class Killer(parallel3d.Callback):
        def on_step(self, line: Json) -> None:
            if line["step"] == 5:
                os.kill(workers()["p3d-rank-3"], signal.SIGKILL)

        def on_membership_change(self, line: Json) -> None:
            changes.append(line)
            if line["joined"]:
                raise parallel3d.StopTraining

    killed = parallel3d.train(tiny, {"run.num_steps": 3000}, callbacks=[Killer()], quiet=True)
    assert [(bool(line["who"]), bool(line["joined"])) for line in changes] == [(True, False), (False, True)]
    assert killed.summary["parameters"] == 257 * 32 * 2 + 32 + 4 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32)

    tiny["run"]["directory"] = tiny["run"]["directory"].with_name("undisturbed")
    calm = parallel3d.train(tiny, {"run.num_steps": killed.final_step}, quiet=True)
    losses = [[line["loss"] for line in result.metrics] for result in (killed, calm)]
    assert len(losses[0]) == killed.final_step > 5
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


FORWARD = """import torch, parallel3d
class Block(torch.nn.Module):
    def forward(self, x):
        return x.no_such_method()
"""
BACKWARD = """import torch, parallel3d
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        return grad.no_such_method()
class Block(torch.nn.Module):
    def forward(self, x):
        return Twice.apply(x)
"""
BUILD = """def build(model):
    return parallel3d.ModelParts(block=lambda index: Block())
"""


@pytest.mark.parametrize(
    ("file", "place"),
    [
        (FORWARD, r"line 4, in forward \(return x.no_such_method\(\)\)"),
        (BACKWARD, r"line 8, in backward \(return grad.no_such_method\(\)\)"),
    ],
    ids=["forward", "backward"],
)
def test_an_error_in_the_users_file_is_one_message(tiny: Json, tmp_path: Path, file: str, place: str) -> None:
    (tmp_path / "mine.py").write_text(file + BUILD)
    tiny["model"]["module"] = f"{tmp_path / 'mine.py'}:build"
    with pytest.raises(UserError, match=rf"mine.py, {place}: AttributeError") as caught:
        parallel3d.train(tiny, quiet=True)
    assert "Traceback" not in str(caught.value)


def test_a_rule_and_a_schedule_of_ones_own(tiny: Json, tmp_path: Path) -> None:
    """As classes in the dict, which workers of two stages import by name; then with an error."""
    tiny["parallel"] = {"pp_size": 2, "schedule": eager_1f1b.EagerOneFOneB}
    tiny["optimizer"] = {"kind": ademamix.AdEMAMix, "rule_settings": {"alpha": 4.0}, "learning_rate": 0.01}
    result = parallel3d.train(tiny, quiet=True)
    assert result.final_step == 6 and result.final_loss < result.metrics[0]["loss"]
    assert result.config["optimizer"]["kind"] == "tests.extending.ademamix:AdEMAMix"
    assert result.config["parallel"]["schedule"] == "tests.extending.eager_1f1b:EagerOneFOneB"

    (tmp_path / "broken.py").write_text(
        "from tests.extending.ademamix import AdEMAMix\n"
        "class Broken(AdEMAMix):\n"
        "    name, has_triton_formula = 'broken', False\n"
        "    def update_block(self, block, step, *, weight_decay):\n"
        "        return block.no_such_part\n"
    )
    with pytest.raises(UserError, match=r"optimizer.kind broken: .*broken.py, line 5, in update_block .*no_such_part"):
        parallel3d.train(tiny, {"optimizer.kind": f"{tmp_path}/broken.py:Broken"}, quiet=True)


def test_a_script_without_a_guard_is_refused(tiny: Json, tmp_path: Path) -> None:
    """Workers import the file for its function, and would start the run again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, parallel3d\n"
        "from pathlib import Path\n"
        "def build(model):\n"
        "    raise AssertionError\n"
        "config = json.loads(Path(__file__).with_name('tiny.json').read_text())\n"
        "config['model']['module'] = build\n"
        "parallel3d.train(config, quiet=True)\n"
    )
    (tmp_path / "tiny.json").write_text(json.dumps(tiny, default=str))
    command = [sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and '`if __name__ == "__main__":`' in done.stderr


def test_a_checkpoint_resumes_on_another_layout(tiny: Json) -> None:
    """Saved by two tensor-parallel ranks on two stages, read by one process, which goes on as if it had begun."""
    tiny["model"]["module"] = own_llama.build
    tiny["precision"] = {"policy": "fp64"}
    tiny["lr_schedule"] = {"decay_steps": 6}
    whole = parallel3d.train(tiny, quiet=True)
    tiny["run"]["directory"] = tiny["run"]["directory"].with_name("resumed")
    tiny["parallel"] = {"tp_size": 2, "pp_size": 2}
    first = parallel3d.train(tiny, {"run.num_steps": 3}, quiet=True)
    assert [path.name for path in first.checkpoints] == ["step-00000003"]
    del tiny["parallel"]
    second = parallel3d.train(tiny, {"run.resume": "auto"}, quiet=True)
    losses = [[line["loss"] for line in result.metrics] for result in (second, whole)]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-9)


class Notes:
    """Documents by index."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> str:
        return f"note {index}: {index * index} is the square of {index}"


def test_a_source_of_ones_own_on_three_axes_and_resumed(tiny: Json) -> None:
    """Eight ranks begin, one process goes on: the losses of a run that was one process all along."""
    tiny["data"] = {**tiny.get("data", {}), "sources": [Notes]}
    tiny |= {"precision": {"policy": "fp64"}, "lr_schedule": {"decay_steps": 6}}
    whole = parallel3d.train(tiny, quiet=True)
    tiny["run"]["directory"] = tiny["run"]["directory"].with_name("resumed")
    tiny["parallel"] = {"tp_size": 2, "pp_size": 2, "dp_size": 2}
    first = parallel3d.train(tiny, {"run.num_steps": 3}, quiet=True)
    del tiny["parallel"]
    second = parallel3d.train(tiny, {"run.resume": "auto"}, quiet=True)
    assert first.config["data"]["sources"] == ["tests.door.test_own_module_runs:Notes"]
    losses = [[line["loss"] for line in result.metrics] for result in (second, whole)]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-9)
