"""The scripts in examples/: how little the elastic one differs from that for DistributedDataParallel; that they run."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def lines_of(name: str) -> list[str]:
    """A script without its docstring and imports."""
    lines = (EXAMPLES / name).read_text().split("\n")
    return [line for line in lines if line and not line.startswith(('"""', "import ", "from "))]


def test_an_elastic_script_differs_in_two_lines_besides_its_start_and_end() -> None:
    diff = difflib.ndiff(lines_of("digits_ddp.py"), lines_of("digits_elastic.py"))
    assert [line[2:].partition("(")[0] for line in diff if line[0] == "-"] == [
        "dist.init_process_group",
        "model = DistributedDataParallel",
        "sampler = DistributedSampler",
        "dist.destroy_process_group",
    ]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("script", ["digits_elastic.py", "digits_exact.py"])
def test_an_example_runs(tmp_path: Path, script: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / script), f"--directory={tmp_path}", "--workers=2", "--epochs=1"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert "test accuracy 0." in ended.stdout
