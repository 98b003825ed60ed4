"""The visit to a GPU, in miniature: its parts are processes, each leaves lines, finished ones are not run again."""

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import gpu
from benchmarks.device import device_checks, profile_parts
from benchmarks.device.workloads import SMOKE, WORKLOADS, load_workload
from parallel3d.config.derived import num_parameters


@pytest.mark.full
def test_all_parts_at_tiny_sizes(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--smoke", "--device", "cpu"]
    assert gpu.main(arguments) == 0, capsys.readouterr().out
    lines = gpu.read_lines(tmp_path / gpu.VISIT)
    assert {line["part"] for line in lines if line.get("event") == "done"} == set(gpu.PARTS)
    contestants = {line["contestant"] for line in lines if "tokens_per_s" in line and "contestant" in line}
    assert {"parallel3d", "nanogpt_shaped"} <= contestants
    assert all(line["equal_bits"] for line in lines if "equal_bits" in line)
    assert gpu.main(arguments) == 0  # nothing is left to do
    assert capsys.readouterr().out.count("done before") == len(gpu.PARTS)
    assert gpu.read_lines(tmp_path / gpu.VISIT) == lines


def test_a_part_that_takes_too_long_is_ended_and_does_not_count_as_done(tmp_path, monkeypatch):
    late = "import time; print('began', flush=True); time.sleep(60)"
    monkeypatch.setattr(gpu, "part_command", lambda name, options: [sys.executable, "-c", late])
    assert gpu.run_part("limits", SimpleNamespace(out=tmp_path), 0.5) == "out of time"
    [line] = gpu.read_lines(tmp_path / gpu.VISIT)
    assert line["event"] == "out of time" and line["seconds"] < 30
    assert gpu.finished_parts(tmp_path / gpu.VISIT) == set()


KILLED_IN_MID_TEST = """
import os, signal
import pytest
def test_good(): pass
def test_bad(): assert 1 + 1 == 3, "so it is"
@pytest.fixture
def broken(): raise OSError("no such thing")
def test_setup(broken): pass
def test_skipped(): pytest.skip()
def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
"""
RUN_TESTS = """
import sys
from pathlib import Path
import torch
from benchmarks.device.device_checks import run_pytest
from benchmarks.device.part_process import Part
part = Part(name="checks", device=torch.device("cpu"), folder=Path(sys.argv[1]), is_smoke=True)
run_pytest(part, [sys.argv[2]])
"""


def test_checks_that_are_killed_in_mid_test_leave_what_they_found(tmp_path, monkeypatch):
    (tmp_path / "test_killed.py").write_text(KILLED_IN_MID_TEST)
    command = [sys.executable, "-c", RUN_TESTS, str(tmp_path), str(tmp_path / "test_killed.py")]
    monkeypatch.setattr(gpu, "part_command", lambda name, options: command)
    assert gpu.run_part("checks", SimpleNamespace(out=tmp_path), 300) == "failed with -9"
    lines = gpu.read_lines(tmp_path / gpu.VISIT)
    found = {line["test"].partition("::")[2]: (line["outcome"], line["why"]) for line in lines if "test" in line}
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_setup": "error",
    }
    assert "so it is" in found["test_bad"][1] and "no such thing" in found["test_setup"][1]
    assert [line["began"] for line in lines if "began" in line][-1].endswith("test_killed")


def test_parts_are_skipped_when_finished_or_without_time(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(gpu, "run_part", lambda name, options, limit_s: ran.append((name, limit_s)) or "done")
    (tmp_path / gpu.VISIT).write_text('{"part": "limits", "event": "done"}\n{"part": "checks", "ev')
    assert gpu.main(["--out", str(tmp_path), "--limit", "100", "limits", "checks", "memory"]) == 0
    assert [name for name, _ in ran] == ["checks", "memory"]
    assert ran[1][1] == gpu.PARTS["memory"][1] and 90 < ran[0][1] <= 100
    assert gpu.main(["--out", str(tmp_path), "--limit", "5", "checks"]) == 1
    assert "no time left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path), "nothing"])


def test_the_sizes_are_those_of_the_goals():
    sizes = {name: round(num_parameters(load_workload(name).model) / 1e6) for name in WORKLOADS}
    assert sizes == {"hlat_7b": 6738, "llama_1.26b": 1262, "gpt2_124m": 124, "gpt2_163m": 163}
    for name in WORKLOADS:
        assert num_parameters(load_workload(name, SMOKE[name]).model) < 50_000


def test_every_part_names_a_function_that_exists():
    for place, limit_s in gpu.PARTS.values():
        module, _, function = place.partition(":")
        source = (gpu.ROOT / "benchmarks" / "device" / f"{module}.py").read_text()
        assert f"\ndef {function}(part: Part)" in source and limit_s > 0


def test_the_tests_of_a_device_are_found():
    paths = device_checks.gpu_test_files()
    names = [path.name for path in paths]
    assert {"test_on_a_device.py", "test_runs_on_a_device.py"} <= {*names}
    starts_runs = ["launch" in path.parts for path in paths]
    assert starts_runs == sorted(starts_runs)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "product"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "product"),
        ("flash_bwd_dot_do_o_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("adamw_rounded", "update"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "elementwise"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert profile_parts.kind_of(kernel) == kind


def test_predictions_by_kind_add_up_to_the_parts_of_the_step():
    config = load_workload("gpt2_124m", SMOKE["gpt2_124m"])
    times = profile_parts.predicted_ms(config, profile_parts.DEVICE_ROWS[1])
    assert {"product", "attention", "elementwise", "update"} <= times.keys() and min(times.values()) >= 0
    assert json.dumps(times)
