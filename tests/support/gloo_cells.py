"""Runs cells on gloo processes, one process for each rank.

`python -m tests.support.gloo_cells FOLDER [NAME ...]` runs the gloo cells (all or the named ones) one after the other,
and writes each rank's results to FOLDER/<cell>/<rank>.pt. One script runs all cells, so torch is imported once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from parallel3d.comparison.collect import run_rank
from parallel3d.comparison.run_result import RunResult, assemble_run
from parallel3d.config.schema import Config
from parallel3d.elastic.launch import run_workers
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.monitor.run_folder import RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.parallel.grid import Grid
from parallel3d.trainer.context import Transports
from parallel3d.trainer.generation import close_generation
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.network import SocketNetwork
from tests.support.cell_table import CELLS
from tests.support.cells import Cell
from tests.support.tiny_runs import build

GLOO_CELLS = {cell.name: cell for cell in CELLS if cell.transport == "gloo"}


def load_gloo_cell(folder: Path, cell: Cell) -> RunResult:
    """Loads the result of a cell that `python -m tests.support.gloo_cells` has run."""
    ranks = build_grid(cell.config).ranks
    return assemble_run([torch.load(folder / cell.name / f"{rank}.pt", weights_only=False) for rank in ranks])


def connect_transports(config: Config, grid: Grid, context: WorkerContext) -> Transports:
    """Transports of a world whose membership never changes: addresses go through the store, without a record."""
    control, network = context.control, SocketNetwork(config, context)
    control.set(f"address/{context.rank}", json.dumps(network.listen(0)).encode())
    addresses = {rank: tuple(json.loads(control.get(f"address/{rank}", control.token))) for rank in grid.ranks}
    hosts = {rank: host for rank, (host, _) in addresses.items()}
    record = GenerationRecord(
        generation=0, grid=grid, previous=None, members=grid.ranks, addresses=addresses, hosts=hosts
    )
    return network.transports(record, control.token)


def run_cell_on_processes(folder: Path, cell: Cell) -> int:
    """Runs one cell with a gloo process for each rank; returns the run's exit code."""
    config, directory = cell.config, folder / cell.name
    grid = build_grid(config)

    def work(context: WorkerContext) -> int:
        torch.set_num_threads(1)
        runtime = build(config, grid, context.rank, connect_transports(config, grid, context))
        torch.save(run_rank(runtime, cell.steps), directory / f"{context.rank}.pt")
        close_generation(runtime)
        return 0

    return run_workers(
        work,
        world_size=len(grid.ranks),
        logs=directory / "logs",
        open_report=lambda: RunReporter(
            RunFolder(directory, config="{}", environment={}), title=cell.name, charts=False
        ),
        preload=("torch",),
    )


if __name__ == "__main__":
    wanted = sys.argv[2:] or list(GLOO_CELLS)
    sys.exit(max(run_cell_on_processes(Path(sys.argv[1]), GLOO_CELLS[name]) for name in wanted))
