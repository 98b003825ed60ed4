"""--preflight: four steps, a save, two resumes, a comparison, and only then the run; with the real command."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.commands import preflight
from parallel3d.comparison.compare_runs import BITWISE
from parallel3d.config.layouts import alternative_layouts
from parallel3d.config.load import dump_config, load_config, resolve
from tests.support.launch_runs import PATIENCE_S, finish, metrics, start

ROOT = Path(__file__).parents[2]
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.json")) if path.stem != "schema"]
pytestmark = pytest.mark.slow
ONE = ("parallel.pp_size=1", "parallel.dp_size=1")


@pytest.mark.full
def test_the_run_starts_after_its_preflight(config_file, tmp_path):
    code, out, err = finish(start("--config", config_file, "--preflight", "checkpoint.every=5", "parallel.dp_size=1"))
    assert code == 0, out + err
    table = out[out.index("largest relative differences of step 4") :].splitlines()
    same, other = table[2].split(), table[4].split()
    assert same == ["tp1.pp2.dp1", "2", *"00000", "ok"]
    assert other[:2] == ["tp2.pp1.dp1", "2"] and other[-1] == "ok" and "MB are free" in out
    assert max(map(float, other[2:-1])) > 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))
    assert CheckpointDirectory(tmp_path / "run" / "checkpoints").steps()[-1] == 12
    assert not (tmp_path / "run" / "checkpoints" / "preflight").exists()
    assert "previous" not in out  # the preflight has left nothing for the run to move aside


@pytest.mark.full
def test_a_difference_ends_it_before_the_run(config_file, tmp_path, monkeypatch, capsys):
    """The resumed trial takes the checkpoint of step 3 with one weight changed."""
    plain = preflight.run

    def run(trial):
        plain(trial)
        if trial.folder.name == "same":
            corrupt_weight(trial.checkpoint(4))

    monkeypatch.setattr(preflight, "run", run)
    monkeypatch.setattr(preflight, "trial_on_other_layout", lambda *arguments, **options: None)
    code = preflight.main(["--config", str(config_file), *ONE])
    out = capsys.readouterr().out
    assert code == 1 and "DIFFERS" in out and "no other layout" in out
    assert "tp1.pp1.dp1: weights of" in out and "(0 is allowed)" in out
    assert not (tmp_path / "run" / "checkpoints" / "preflight").exists()


def corrupt_weight(checkpoint):
    """Changes the first weight of a file, which is not verified after the save."""
    shard = next(checkpoint.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    shard.write_bytes(data)


@pytest.mark.full
def test_a_mistake_in_the_data_is_reported_and_its_log_kept(config_file, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    code, out, err = finish(start("--config", config_file, "--preflight", *ONE, f'data.sources=["{empty}"]'))
    scratch = tmp_path / "run" / "checkpoints" / "preflight"
    assert code == 2 and "failed with exit code 2" in err and "empty.txt" in err, out + err
    assert (scratch / "whole.log").exists() and not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not list(scratch.glob("*/checkpoints"))


@pytest.mark.full
def test_under_a_launcher_there_is_one_clear_error(config_file):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1")
    code, out, err = finish(start("--config", config_file, "--preflight", *ONE, launcher=launcher))
    assert code != 0 and err.count("--preflight starts workers of its own") == 1 and "launch/preflight.py" in err


@pytest.mark.full
def test_ctrl_c_ends_a_preflight(config_file, tmp_path):
    process = start("--config", config_file, "--preflight", *ONE)
    scratch = tmp_path / "run" / "checkpoints" / "preflight"
    deadline = time.monotonic() + PATIENCE_S
    while not (scratch / "whole" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline, "the preflight never began"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in out + err, out + err
    assert not scratch.exists() and not (tmp_path / "run" / "metrics.jsonl").exists()


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parallel, first",
    [
        (dict(pp=2, dp=2), "tp1.pp4.dp1"),
        (dict(dp=4), "tp1.pp2.dp2"),
        (dict(tp=2, pp=2, dp=2), "tp1.pp4.dp2"),
        (dict(tp=4), "tp2.pp2.dp1"),
        (dict(pp=2), "tp2.pp1.dp1"),
        (dict(dp=3), "tp1.pp3.dp1"),
        (dict(), None),
    ],
    ids=str,
)
def test_which_layout_comes_first(config_file, parallel, first):
    overrides = [f"parallel.{name}_size={parallel.get(name, 1)}" for name in ("tp", "pp", "dp")]
    shape = ["model.num_hidden_layers=4", "model.num_attention_heads=4", "batch.global_batch_size=12"]
    config = resolve(load_config(config_file, [*overrides, *shape]), config_path="x")
    names = [layout.name for layout in alternative_layouts(config)]
    assert (names[0] if names else None) == first
    assert len(set(names)) == len(names)


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_has_a_preflight(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = resolve(load_config(path), config_path=path)
    for trial in (
        preflight.trial_of(config, tmp_path),
        preflight.trial_on_other_layout(config, tmp_path, resume=tmp_path),
    ):
        assert trial is None or load_config(written(trial, tmp_path)).run.num_steps == 4


def written(trial, folder):
    path = folder / "trial.json"
    path.write_text(dump_config(trial.config))
    return path


def test_null_is_only_as_near_as_null():
    assert preflight.relative_difference(None, None) == 0 and preflight.relative_difference(
        1.0, None
    ) == math.inf == preflight.relative_difference(None, 1.0)
    assert (
        preflight.relative_difference(1.5, 1.0) == 0.5
        and preflight.relative_difference(0.0, 0.0) == 0
        and BITWISE.weights == 0
    )
