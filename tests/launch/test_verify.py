"""launch/verify.py: layouts of a user's own run are compared with one process, and what differs is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.commands import verify
from parallel3d.layers.parameter import ShardedParameter

ROOT = Path(__file__).parents[2]
BROKEN = "layers.1.mlp.down.weight"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    """The quickstart, made small on the command line, on a text of its own."""
    folder = tmp_path_factory.mktemp("verify")
    sources = sorted(Path(os.__file__).parent.glob("[a-b]*.py"))
    (folder / "text.txt").write_text("\n".join(source.read_text(errors="replace") for source in sources))
    return [
        *("--config", str(ROOT / "configs" / "quickstart.json")),
        *("model.vocab_size=512", "model.hidden_size=16", "model.intermediate_size=24", "model.num_hidden_layers=2"),
        *("model.num_attention_heads=2", "batch.sequence_length=8", "batch.global_batch_size=8"),
        *(f'data.sources=["{folder / "text.txt"}"]', f"data.cache_directory={folder / 'cache'}"),
    ]


def run(arguments: list[str], capsys) -> tuple[int, str, str]:
    code = verify.main(arguments)
    return code, *capsys.readouterr()


@pytest.mark.full
def test_as_people_run_it(arguments: list[str]):
    command = [sys.executable, str(ROOT / "launch" / "verify.py"), *arguments, "precision.policy=fp64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:8]] == [
        *("layout", "tp1.pp2.dp2", "tp2.sp", "pp2", "dp2", "tp2.pp2.dp2.sp", "allowed"),
    ]
    assert "5 of 5 layouts train like one process" in done.stdout and "BEYOND" not in done.stdout
    assert "hidden_size 192 -> 16" in done.stderr and "precision.policy (not in the file) -> fp64" in done.stderr
    assert "one process     step 3 of 3" in done.stderr and "memory: about 0.0 GiB" in done.stderr


def test_one_json_object(arguments: list[str], capsys):
    more = ["--json", "--steps", "2", "--layouts", "pp2.dp2/1.zero0.gpipe,dp2", "precision.policy=bf16"]
    code, out, err = run([*arguments, *more], capsys)
    result = json.loads(out)
    assert code == 0 and result["is_equal"] and result["steps"] == 2 and result["policy"] == "bf16"
    uneven, wide = result["layouts"]
    assert uneven["layout"] == "pp2.dp2/1.zero0.gpipe" and uneven["ranks"] == 3
    assert uneven["parallel"]["stage_replicas"] == [2, 1] and uneven["parallel"]["schedule"] == "gpipe"
    assert wide["parallel"]["schedule"] == "1f1b" and wide["findings"] == []
    assert 0 <= wide["gradients"]["value"] < wide["tolerance"]["gradients"] and wide["weights"]["where"]


def test_exact_sums_are_held_to_the_bit(arguments: list[str], capsys):
    more = ["--json", "--layouts", "pp2.dp2,tp2", "precision.sums=exact"]
    code, out, _ = run([*arguments, *more], capsys)
    exact, over_tp = json.loads(out)["layouts"]
    assert code == 0 and exact["tolerance"]["weights"] == 0 == exact["weights"]["value"]
    assert over_tp["tolerance"]["weights"] > 0


def test_a_wrong_gradient_is_found_and_named(arguments: list[str], capsys, monkeypatch):
    """One layer's weight gradient is a hundredth too large where it is cut."""
    attach = ShardedParameter.attach

    def attach_wrong_sink(weight, sink):
        attach(weight, sink)
        if weight.sharding.name == BROKEN and weight.shape != weight.sharding.shape:
            right = sink.add_product
            sink.add_product = lambda grad, x: right(grad * 1.01, x)

    monkeypatch.setattr(ShardedParameter, "attach", attach_wrong_sink)
    code, out, _ = run([*arguments, "--layouts", "dp2,tp2", "--steps", "2"], capsys)
    assert code == 1 and "1 of 2 layouts train like one process" in out
    findings = [line for line in out.splitlines() if line.startswith("tp2: ")]
    assert f"tp2: the first step's gradient of {BROKEN} differs by 1.0e-02 (0.0001 is allowed)" in findings


@pytest.mark.full
def test_ranks_that_disagree_are_a_finding(arguments: list[str], capsys, monkeypatch):
    """Norms under sequence parallelism see a part of the tokens each, and their gradients are not summed."""
    make_stage = verify.make_stage

    def make_forgetful_stage(config, layers, tp, device, gemm):
        stage = make_stage(config, layers, tp, device, gemm=gemm)
        for parameter in stage.parameters():
            parameter.sharding = replace(parameter.sharding, partial_grad=False)
        return stage

    monkeypatch.setattr(verify, "make_stage", make_forgetful_stage)
    code, out, err = run([*arguments, "--layouts", "tp2.sp", "--steps", "1"], capsys)
    assert code == 1 and "FAILED" in out and "norm.weight differs over the tp group" in out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--layouts", "tp2.qq2"], "'qq2'"),
        (["--layouts", "tp8"], "layout tp8: the configuration has"),
        (["--layouts", "dp16"], "parallel.dp_size"),
        (["model.hiden_size=3"], "model.hidden_size"),
        (["data.sources=[]", "--layouts", "dp2", "model.hidden_size=262144", "model.intermediate_size=1048576"], "GiB"),
    ],
)
def test_mistakes_get_one_message(arguments: list[str], more: list[str], named: str, capsys):
    code, out, err = run([*arguments, *more], capsys)
    assert code == 2 and named in err and "Traceback" not in err and not out


def test_arguments_that_are_none(arguments: list[str]):
    for wrong in (["--steps", "0"], ["--steps", "x"], ["fast"]):
        with pytest.raises(SystemExit, match="2"):
            verify.main([*arguments, *wrong])
