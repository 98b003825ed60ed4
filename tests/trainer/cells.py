"""One place that turns sizes into a run: in threads here, on real gloo processes when started as a script.

`python cells.py FOLDER` runs every cell of PROCESS_CELLS, one after the other, each rank a process of its own, and
leaves what the ranks bring home in FOLDER/<cell>/<rank>.pt. One script for all cells: torch is imported once.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from launch.worker import meet
from models.llama import make_llama_stage
from parallel3d.config.load import check_config, resolve
from parallel3d.config.schema import Config
from parallel3d.data.lanes import Lanes
from parallel3d.elastic.run import run_workers
from parallel3d.elastic.spawn import WorkerContext
from parallel3d.monitor.run_folder import RunFolder
from parallel3d.monitor.sinks import RunReport
from parallel3d.topology.grid import Grid
from parallel3d.trainer.build import RankRuntime, Transports, build_grid, build_rank
from parallel3d.trainer.verify import LayoutRun, assemble, run_in_threads, run_rank


class Texts:
    """Documents in memory: the interpreter's own help topics, about 80 of them."""

    def __init__(self) -> None:
        self.texts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, number: int) -> str:
        return self.texts[number]


class ByteTokenizer:
    """Bytes as tokens, 256 ends a document."""

    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode()


def make_config(*, world_size: int | None = None, **changes) -> Config:
    """A tiny Llama; changes by section: parallel=dict(tp_size=2), ..."""
    sections = dict(
        model=dict(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            initializer_range=0.1,
        ),
        parallel=dict(bucket_mib=0.03),
        batch=dict(global_batch_size=8, micro_batch_size=1, sequence_length=16),
        precision=dict(policy="fp64"),
        optimizer=dict(learning_rate=1e-2, max_grad_norm=0.5),
        schedule=dict(warmup_steps=2),
        data=dict(),
        run=dict(num_steps=3, evaluate_batches=1, timeout_s=60.0),
    )
    for section, values in changes.items():
        sections[section] = {**sections[section], **values}
    config = resolve(Config(**sections), config_path="test.json", world_size=world_size)
    check_config(config)
    return config


def build(config: Config, grid: Grid, rank: int, transports: Transports, train_lanes=None) -> RankRuntime:
    """One rank of a cell, on the help topics; `train_lanes` for a test that watches the reads."""
    return build_rank(
        config,
        rank,
        grid,
        epoch=0,
        transports=transports,
        make_stage=make_llama_stage,
        train_lanes=train_lanes or topic_lanes(config),
        evaluate_lanes=Lanes(Texts(), ByteTokenizer(), config.run.seed + 1, 5),
        device=torch.device("cpu"),
    )


def topic_lanes(config: Config) -> Lanes:
    return Lanes(Texts(), ByteTokenizer(), config.run.seed, config.batch.global_batch_size)


def run_cell_in_threads(*, steps: int = 3, slots: int = 3, **changes) -> LayoutRun:
    config = make_config(**changes)
    grid = build_grid(config)
    return run_in_threads(grid, partial(build, config, grid), steps, slots=slots)


PROCESS_CELLS: dict[str, dict] = {
    "tp2": dict(parallel=dict(tp_size=2)),
    "tp2-sp": dict(parallel=dict(tp_size=2, sequence_parallel=True)),
    "tp4-sp-gqa": dict(parallel=dict(tp_size=4, sequence_parallel=True), model=dict(num_key_value_heads=4)),
    "pp2": dict(parallel=dict(pp_size=2)),
    "pp4-gpipe": dict(parallel=dict(pp_size=4, schedule="gpipe")),
    "dp2": dict(parallel=dict(dp_size=2)),
    "dp4-zero0": dict(parallel=dict(dp_size=4, zero_stage=0)),
    "pp2-dp2": dict(parallel=dict(pp_size=2, dp_size=2)),
    "tp2-dp2-sp": dict(parallel=dict(tp_size=2, dp_size=2, sequence_parallel=True)),
    "tp2-pp2-dropout": dict(parallel=dict(tp_size=2, pp_size=2), model=dict(hidden_dropout=0.2)),
    "stages-2-1": dict(parallel=dict(pp_size=2, stage_replicas=[2, 1])),
    "tp2-pp2-dp2-sp": dict(parallel=dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True, order="dp_pp_tp")),
    "fp32-tp2-pp2-dp2": dict(
        parallel=dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True), precision=dict(policy="fp32")
    ),
    "bf16-tp2-dp2-sp": dict(parallel=dict(tp_size=2, dp_size=2, sequence_parallel=True), precision=dict(policy="bf16")),
    "fifty-steps": dict(
        parallel=dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True),
        precision=dict(policy="fp32"),
        optimizer=dict(learning_rate=3e-3, max_grad_norm=1.0),
        run=dict(num_steps=50),
    ),
}


def cell_steps(name: str) -> int:
    return PROCESS_CELLS[name].get("run", {}).get("num_steps", 3)


def load_process_cell(folder: Path, name: str) -> LayoutRun:
    """What `python cells.py` left of a cell."""
    grid = build_grid(make_config(**PROCESS_CELLS[name]))
    return assemble([torch.load(folder / name / f"{rank}.pt", weights_only=False) for rank in grid.ranks])


def run_cell_on_processes(folder: Path, name: str) -> int:
    """Runs one cell with a gloo process for each rank; returns the run's exit code."""
    config = make_config(**PROCESS_CELLS[name])
    grid = build_grid(config)

    def work(context: WorkerContext) -> int:
        torch.set_num_threads(1)
        runtime = build(config, grid, context.rank, meet(config, context, context.control.token))
        torch.save(run_rank(runtime, cell_steps(name)), folder / name / f"{context.rank}.pt")
        runtime.close()
        return 0

    directory = folder / name
    report = partial(RunFolder, directory, config="{}", environment={})
    return run_workers(
        work,
        world_size=len(grid.ranks),
        logs=directory / "logs",
        open_report=lambda: RunReport(report(), title=name),
        preload=("torch",),
    )


if __name__ == "__main__":
    sys.exit(max(run_cell_on_processes(Path(sys.argv[1]), name) for name in PROCESS_CELLS))
