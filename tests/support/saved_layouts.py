"""Saves and loads of whole layouts in threads, without a trainer: what is compared is on disk, or in the parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.directory import CheckpointDirectory, verify_checkpoint
from parallel3d.checkpoint.index import RunFacts
from parallel3d.checkpoint.read import CheckpointReader
from parallel3d.checkpoint.snapshot import Snapshot, take_snapshot
from parallel3d.checkpoint.write import publish, write_rank_files
from parallel3d.comparison.run_result import RankResult, assemble_run
from parallel3d.config.schema import Config
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.layers.init import InitMethod
from parallel3d.trainer.context import RankContext, Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.resume import resume, state_to_json
from parallel3d.trainer.step import train_step
from tests.support import tiny_runs

TEXT = {"fingerprint": "topics"}


def run_layout(
    config: Config, *, start: Path | None = None, initial: InitMethod | None = None, steps: int = 0
) -> tuple[dict[str, Tensor], list[Snapshot], list[RankContext]]:
    """Global weights of a layout that begins from a checkpoint, from given weights or the seed (none where no step was
    ever made), and what each rank would save."""
    grid = build_grid(config)

    def body(rank: int, world: ThreadWorld) -> tuple[RankResult, Snapshot, RankContext]:
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        runtime = tiny_runs.prepare(config, grid, rank, initial=initial)
        if start is not None:
            resume(runtime, start, TEXT)
        start_rank(runtime, grid, transports)
        for _ in range(steps):
            train_step(runtime)
        runtime.optimizer.finish_gather()
        weights = {p.sharding.name: p.detach().clone() for b in runtime.optimizer.buckets for p in b.parameters}
        run = RankResult(
            coordinates=runtime.coordinates,
            shardings={p.sharding.name: p.sharding for b in runtime.optimizer.buckets for p in b.parameters},
            entries=list(runtime.state.entries),
            initial=weights,
            weights=weights,
        )
        snapshot = take_snapshot(runtime.optimizer, tp=runtime.tp_shard)
        return run, snapshot, runtime

    done = run_threads(len(grid.ranks), body, world=ThreadWorld(len(grid.ranks)))
    runs, snapshots, runtimes = zip(*done)
    weights = dict(assemble_run(runs).weights) if runs[0].entries else {}
    return weights, list(snapshots), list(runtimes)


def save(
    directory: Path,
    snapshots: list[Snapshot],
    runtime: RankContext,
    *,
    step: int | None = None,
) -> Path:
    """Writes what all ranks have, one after the other, and publishes it."""
    checkpoint_dir = CheckpointDirectory(directory)
    step = runtime.state.iteration if step is None else step
    partial = checkpoint_dir.partial_path(step, 0)
    checkpoint_dir.remove_leftovers(keep=partial)
    for rank, snapshot in enumerate(snapshots):
        write_rank_files(checkpoint_dir.disk, partial, rank, snapshot)
    facts = RunFacts(state=state_to_json(runtime.state), config=runtime.config.model_dump(), text=TEXT)
    publish(checkpoint_dir, partial, step, range(len(snapshots)), facts)
    return checkpoint_dir.path_of(step)


def read_all(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Every tensor of a checkpoint, whole, by (kind, name)."""
    index = verify_checkpoint(folder)
    reader = CheckpointReader(folder, index)
    return {
        (kind, name): reader.read(kind, name, (0,) * len(tensor.shape), tensor.shape)
        for name, tensor in index.tensors.items()
        for kind in tensor.kinds
    }


def assert_equal(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    different = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
    assert not different, different
