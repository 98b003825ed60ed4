"""launch/find_batch.py: real searches with a limit, and a rank without memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.commands.batch_memory import TriedBatch, describe_stages
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
    """The layout stays, warmups of sizes are left out."""
    overrides = ["warmup.batch_size.start=8", "warmup.batch_size.duration=100"]
    config = resolve(load_config(QUICKSTART, overrides), config_path=QUICKSTART)
    search = BatchSearch(config, tmp_path, limit=2**30, num_steps=3)
    short = search._short_config(3, tmp_path / "run")
    assert short.parallel == config.parallel
    assert (short.batch.micro_batch_size, short.batch.global_batch_size) == (3, 3 * 6)
    assert short.warmup.batch_size.start is None
    assert short.run.num_steps == 3 and not short.checkpoint.save_at_end


@pytest.mark.parametrize("configured", [1, 2, 8])
@pytest.mark.parametrize("tried, per_replica", [(1, 4), (2, 4), (3, 3), (4, 2), (7, 2), (8, 1)])
def test_short_runs_fill_the_pipeline_as_the_answer_will(tmp_path, configured, tried, per_replica):
    """Two stages, two replicas with 8 sequences each: at most 4 micro-batches, whatever the configured size."""
    config = resolve(load_config(QUICKSTART, [f"batch.micro_batch_size={configured}"]), config_path=QUICKSTART)
    short = BatchSearch(config, tmp_path, limit=2**30, num_steps=3)._short_config(tried, tmp_path / "run")
    assert short.batch.num_micro_batches == 2 * per_replica


def test_the_stage_that_fills_the_limit_first():
    """Stage 0 takes 1 + b GiB, stage 1 3 + b / 2: at 5.2 GiB 4 sequences fit; what did not fit is not in a line."""
    sizes = [1, 2, 4]
    runs = [tried(size, fits=True, stage_peaks=(1 + size, 3 + size / 2)) for size in sizes]
    runs.append(tried(8, fits=False, stage_peaks=(6, 0)))
    planned = {size: (size << 30, size << 29) for size in sizes}
    first, second, _, bound = describe_stages(runs, planned, int(5.2 * 2**30), on_device=False)
    assert first.startswith("peak of stage 0: 1.00 GiB + 1.0000 GiB") and first.endswith(
        "0.00 GiB + 1.0000 GiB a sequence"
    )
    assert second.startswith("peak of stage 1: 3.00 GiB + 0.5000 GiB") and second.endswith("0.5000 GiB a sequence")
    assert bound == "the line of stage 0 fills the limit first, at a micro-batch of 4"
    [*_, bound] = describe_stages(runs, planned, 3 << 30, on_device=False)
    assert bound == "the line of stage 1 fills the limit first, at a micro-batch of 0"


@pytest.mark.parametrize(
    "peaks",
    [
        (0.324, 0.3225),  # 0.32 GiB + -0.0015 GiB a sequence
        (0.320, 0.324, 0.322),
        (0.32, 0.33, 0.31, 0.33),
        (0.32, 0.32, 0.32),
    ],
)
def test_a_slope_within_the_noise_is_too_small_to_be_measured(peaks):
    runs = [tried(2**place, fits=True, stage_peaks=(peak, 2**place)) for place, peak in enumerate(peaks)]
    planned = {run.micro_batch_size: (run.micro_batch_size << 20, 1 << 30) for run in runs}
    first, second, _, bound = describe_stages(runs, planned, 4 << 30, on_device=False)
    assert f"stage 0: {max(peaks):.2f} GiB, and a sequence adds too little to be measured" in first
    assert "0.00 GiB + 1.0000 GiB a sequence (R^2 1.0000)" in second
    assert bound == "the line of stage 1 fills the limit first, at a micro-batch of 4"


def tried(size, *, fits, stage_peaks):
    peaks = tuple(int(peak * 2**30) for peak in stage_peaks)
    return TriedBatch(
        micro_batch_size=size, fits=fits, peak_bytes=max(peaks), rank=0, stage_peaks=peaks, tokens_per_s=None
    )


def search_above_one(out, settings, *, spare_mib):
    """Searches with a limit that a micro-batch of one leaves `spare_mib` below; returns what is printed, the answer and
    the limit in bytes."""
    first = find_batch("--limit", "100", "--most", "1", "--out", str(out), *settings)
    assert first.returncode == 0, first.stdout + first.stderr
    [run] = json.loads((out / "answer.json").read_text())["runs"]
    limit = run["peak_bytes"] + (spare_mib << 20)
    found = find_batch("--limit", str(limit / 2**30), "--out", str(out), *settings)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout, json.loads((out / "answer.json").read_text()), limit


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
def test_stages_of_unequal_memory(tmp_path):
    """Layers are shared unevenly: the stage with five of the six limits the search, and the answer trains."""
    settings = [*TINY, "parallel.pp_size=2", "model.num_hidden_layers=6", "parallel.layers_per_stage=[1,5]"]
    settings += ["batch.global_batch_size=8", "batch.sequence_length=1024"]  # a sequence adds more than malloc's noise
    printed, answer, limit = search_above_one(tmp_path / "search", settings, spare_mib=800)
    largest, runs = answer["largest_micro_batch_size"], {each["micro_batch_size"]: each for each in answer["runs"]}
    assert 2 <= largest < 8 and not runs[largest + 1]["fits"]
    assert runs[largest + 1]["rank"] == 1 and runs[largest + 1]["stage_peaks"][0] < limit
    assert all(
        max(each["stage_peaks"]) == each["peak_bytes"] and min(each["stage_peaks"]) > 0 for each in runs.values()
    )
    planned = {
        int(stage): float(slope)
        for stage, slope in re.findall(r"peak of stage (\d): .*planned \S+ GiB \+ (\S+) GiB a sequence", printed)
    }
    assert planned.keys() == {0, 1} and 1.5 * planned[0] < planned[1], printed  # measured slopes have malloc's noise
    assert re.search(r"the line of stage \d fills the limit first", printed), printed
    overrides = [*settings, *answer["overrides"], "run.num_steps=1", f"run.directory={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "parallel3d", "train", "--config", str(QUICKSTART), *overrides]
    trained = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert trained.returncode == 0, trained.stdout + trained.stderr


@pytest.mark.full
def test_a_limit_of_the_machine(tmp_path):
    """Each size that fits is below the limit, the next one above; the answer starts a run."""
    printed, answer, limit = search_above_one(tmp_path / "search", TINY, spare_mib=250)
    runs = {each["micro_batch_size"]: each for each in answer["runs"]}
    largest = answer["largest_micro_batch_size"]
    assert 1 <= largest < 48
    assert runs[largest]["fits"] and not runs[largest + 1]["fits"]
    assert all(each["fits"] == (each["peak_bytes"] <= limit) for each in runs.values())
    assert 48 % answer["batch"]["micro_batch_size"] == 0
    assert "; planned 0." in printed
    load_config(QUICKSTART, [*TINY, *answer["overrides"]])


@pytest.mark.full
def test_nothing_fits(tmp_path):
    found = find_batch("--limit", "0.05", "--out", str(tmp_path / "search"), *TINY)
    assert found.returncode == 1
    [error] = found.stderr.splitlines()
    assert error.startswith("not even a micro-batch of 1 fits: rank 0 (stage 0) took")
    assert "the limit is 0.05 GiB a rank" in error and "parallel.recompute" in error


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_one_rank_of_two_without_memory(tmp_path, axis):
    """Its error ends the run of both with a code of its own, and the search takes it for a size that does not fit."""
    (tmp_path / "starved.py").write_text(STARVED)
    settings = ["parallel.pp_size=1", "parallel.dp_size=1", f"parallel.{axis}_size=2", "model.module=starved.py:build"]
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
