"""launch/find_batch.py: real searches with a limit, and a rank without memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.commands.find_batch import BatchSearch
from parallel3d.config.load import load_config, resolve
from parallel3d.errors import EXIT_OUT_OF_MEMORY, exit_code_of, is_out_of_memory

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs/quickstart.json"
TINY = [
    "model.hidden_size=48",
    "model.intermediate_size=4096",
    "model.num_hidden_layers=2",
    "parallel.pp_size=1",
    "parallel.dp_size=1",
    "batch.global_batch_size=48",
    "batch.micro_batch_size=1",
    "batch.sequence_length=256",
    "elastic.zero_backups=0",
]
STARVED = """
import torch
from pathlib import Path
from torch import nn
import parallel3d

class Block(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.linear = nn.Linear(model.hidden_size, model.hidden_size)

    def forward(self, x):
        if Path("/proc/self/comm").read_text().strip() == "p3d-rank-1" and len(x) > 1:
            torch.empty(2**50)
        return x + self.linear(x)

def build(model):
    return parallel3d.ModelParts(block=lambda index: Block(model))
"""


def find_batch(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch/find_batch.py"), "--config", str(QUICKSTART), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize(
    "error, counts",
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_allocators_without_memory_count(error, counts):
    assert is_out_of_memory(error) == counts
    assert (exit_code_of(error) == EXIT_OUT_OF_MEMORY) == counts


def test_torchs_own_error_counts():
    import torch

    assert exit_code_of(torch.OutOfMemoryError("CUDA out of memory")) == EXIT_OUT_OF_MEMORY
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


def test_sizes_of_short_runs(tmp_path):
    """The layout stays, the number of micro-batches is what fills the pipeline, warmups of sizes are left out."""
    overrides = ["warmup.batch_size.start=8", "warmup.batch_size.duration=100"]
    config = resolve(load_config(QUICKSTART, overrides), config_path=QUICKSTART)
    search = BatchSearch(config, tmp_path, limit=2**30, num_steps=3)
    short = search._short_config(3, tmp_path / "run")
    assert short.parallel == config.parallel
    assert (short.batch.micro_batch_size, short.batch.global_batch_size) == (3, 3 * 8)
    assert short.warmup.batch_size.start is None
    assert short.run.num_steps == 3 and not short.checkpoint.save_at_end


@pytest.mark.full
def test_a_limit_of_the_machine(tmp_path):
    """Each size that fits is below the limit, the next one above; the answer starts a run."""
    out = tmp_path / "search"
    first = find_batch("--limit", "100", "--most", "1", "--out", str(out), *TINY)
    assert first.returncode == 0, first.stdout + first.stderr
    [run] = json.loads((out / "answer.json").read_text())["runs"]
    limit = run["peak_bytes"] + (250 << 20)
    found = find_batch("--limit", str(limit / 2**30), "--out", str(out), *TINY)
    assert found.returncode == 0, found.stdout + found.stderr
    answer = json.loads((out / "answer.json").read_text())
    runs = {each["micro_batch_size"]: each for each in answer["runs"]}
    largest = answer["largest_micro_batch_size"]
    assert 1 <= largest < 48
    assert runs[largest]["fits"] and not runs[largest + 1]["fits"]
    assert all(each["fits"] == (each["peak_bytes"] <= limit) for each in runs.values())
    assert 48 % answer["batch"]["micro_batch_size"] == 0
    assert "planned:" in found.stdout
    load_config(QUICKSTART, [*TINY, *answer["overrides"]])


@pytest.mark.full
def test_nothing_fits(tmp_path):
    found = find_batch("--limit", "0.05", "--out", str(tmp_path / "search"), *TINY)
    assert found.returncode == 1
    assert "not even a micro-batch of 1 fits" in found.stdout


@pytest.mark.full
def test_one_rank_of_two_without_memory(tmp_path):
    """Its error ends the run of both with a code of its own, and the search takes it for a size that does not fit."""
    (tmp_path / "starved.py").write_text(STARVED)
    settings = ["parallel.pp_size=1", "parallel.dp_size=2", "model.module=starved.py:build"]
    found = find_batch("--limit", "100", "--out", str(tmp_path / "search"), *settings, cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    answer = json.loads((tmp_path / "search/answer.json").read_text())
    assert [(run["micro_batch_size"], run["fits"]) for run in answer["runs"]] == [(1, True), (2, False)]
    log = (tmp_path / "search/micro-batch-2.log").read_text()
    assert "parallel3d find-batch" in log and "rank 1" in log


@pytest.mark.full
def test_another_error_ends_the_search(tmp_path):
    (tmp_path / "starved.py").write_text(STARVED.replace("torch.empty(2**50)", 'raise ValueError("no")'))
    settings = ["parallel.pp_size=1", "parallel.dp_size=2", "model.module=starved.py:build"]
    found = find_batch("--limit", "100", "--out", str(tmp_path / "search"), *settings, cwd=tmp_path)
    assert found.returncode == 2
    assert "starved.py" in found.stderr and "micro-batch 2" in found.stderr
