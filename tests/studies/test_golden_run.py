"""Golden losses that are kept here: a real run of 20 steps must still have them, on any processor and layout.

`golden_tiny.json` was recorded on an AMD EPYC (family 26) with these settings, by `study golden RUN --record`.
A change that is meant to alter losses records it again, and says why.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.commands.main import run

GOLDEN = Path(__file__).with_name("golden_tiny.json")
SETTINGS = (
    "run.num_steps=20",
    "model.num_hidden_layers=2",
    "precision.policy=fp32",
    "monitor.charts=false",
    "monitor.page=false",
)

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize("more", [(), ("parallel.pp_size=2", "run.cpu_gemm=mkl", "run.kernels=torch")])
def test_a_run_still_has_its_golden_losses(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """To 1e-3 in fp32. Other kernels, libraries and layouts were found to differ by 2e-8; another epsilon of the norms
    (1e-3) by 2e-2, another decay of AdamW's second moment (0.96) by 1.3e-3."""
    folder = str(tmp_path / "run")
    assert run("train", ["--config", str(tiny), *SETTINGS, *more, f"run.directory={folder}"]) == 0
    capsys.readouterr()
    code = run("study", ["golden", folder, "--against", str(GOLDEN)])
    assert code == 0, capsys.readouterr().out
    assert "equal: 20 steps within 0.001" in capsys.readouterr().out


def test_another_optimizer_is_noticed(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    changed = ["optimizer.beta2=0.96", f"run.directory={folder}"]
    assert run("train", ["--config", str(tiny), *SETTINGS, *changed]) == 0
    assert run("study", ["golden", folder, "--against", str(GOLDEN)]) == 1
    assert "another setting: optimizer.beta2: 0.96, golden 0.95" in capsys.readouterr().out
