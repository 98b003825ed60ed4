"""An elastic loop trains to the weights that torch's DistributedDataParallel has after the same batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ddp_loop
from tests.support.ddp_loop import NUM_SAMPLES, WORLD_SIZE
from tests.support.loop_threads import run_loop
from tests.support.processes import read_to_the_end


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(batch_size=4), dict(batch_size=None, on_failure="drop")])
def test_a_plain_loop_has_the_weights_of_torchs_data_parallel(tmp_path: Path, options: dict[str, Any]) -> None:
    """Two workers with slots of two samples, two epochs of six steps. float64: 1e-12 is for the order of operations,
    since the mean of two means is a sum that is divided once here."""
    run = run_loop(
        WORLD_SIZE, is_plain_loop=True, sampler=options, num_samples=NUM_SAMPLES, dtype=torch.float64, sums="float"
    )
    batches = [[samples for _, samples in sorted(run.computed[rank])] for rank in range(WORLD_SIZE)]
    assert [[len(samples) for samples in each] for each in batches] == [[2] * 12] * WORLD_SIZE
    (tmp_path / "batches.json").write_text(json.dumps(batches))
    root = Path(ddp_loop.__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.ddp_loop", str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    for rank, process in enumerate(processes):
        _, err = read_to_the_end(process)
        assert process.returncode == 0, err
        theirs = torch.load(tmp_path / f"weights-{rank}.pt")
        torch.testing.assert_close(run.weights[rank], theirs, rtol=0, atol=1e-12)
