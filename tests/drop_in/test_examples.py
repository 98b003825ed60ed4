"""The scripts in examples/: how little the elastic one differs from that for DistributedDataParallel; that they run."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


DDP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
model = DistributedDataParallel(network)
sampler = DistributedSampler(training, seed=options.seed)
dist.destroy_process_group()
"""
START = """
from parallel3d import elastic
elastic.init(options.workers, directory=options.directory, seed=options.seed, max_rejoins=options.rejoins)
"""
CHANGES = {
    "digits_elastic.py": (
        DDP,
        START
        + """
from torch.utils.data import DataLoader
model = elastic.DataParallel(network, optimizer, sums="exact")
sampler = elastic.Sampler(training, batch_size=256, slot_size=64, seed=options.seed)
""",
    ),
    "digits_drop.py": (
        DDP,
        START
        + """
from torch.utils.data import DataLoader
model = elastic.DataParallel(network, optimizer)
sampler = elastic.Sampler(training, slot_size=64, on_failure="drop", seed=options.seed)
""",
    ),
    "digits_steps.py": (
        DDP
        + """
loader = DataLoader(training, batch_size=64, sampler=sampler)
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
        START
        + """
model = elastic.DataParallel(network, optimizer, sums="exact")
sampler = elastic.Sampler(training, slot_size=64, batch_size=256, seed=options.seed)
for step in elastic.steps(sampler, epochs=options.epochs):
    for x, y in step:
        loss = functional.cross_entropy(model(x), y)
        step.add_loss(loss)
        loss.backward()
    optimizer.step()
""",
    ),
}
"""Of the lines of digits_ddp.py those that an elastic script does not have, and those that it has instead."""


def split(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


@pytest.mark.parametrize("name", CHANGES)
def test_an_elastic_script_differs_in_these_lines_alone(name: str) -> None:
    """Besides docstrings and blank lines; as docs/drop_in.md counts them."""
    theirs, ours = (split((EXAMPLES / each).read_text())[1:] for each in ("digits_ddp.py", name))
    diff = list(difflib.ndiff(theirs, ours))
    removed, added = (sorted(line[2:] for line in diff if line[0] == sign) for sign in "-+")
    assert removed == sorted(split(CHANGES[name][0]))
    assert added == sorted(split(CHANGES[name][1]))
    counts = f"{len(removed)} lines go and {len(added)} come"
    assert counts in " ".join((EXAMPLES.parent / "docs/drop_in.md").read_text().split())


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("script", ["digits_elastic.py", "digits_drop.py", "digits_steps.py"])
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
