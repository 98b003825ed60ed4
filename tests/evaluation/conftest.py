"""A run in threads on files of a blend, with an evaluation at its end, and its checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.index import RunFacts
from parallel3d.checkpoint.snapshot import take_snapshot
from parallel3d.checkpoint.write import publish, write_rank_files
from parallel3d.config.schema import Config
from parallel3d.data.corpus import Corpus
from parallel3d.data.run_data import build_evaluation_lanes, build_reader, fingerprint_data, open_run_corpus
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.models.make import make_stage
from parallel3d.parallel.abort import AbortToken
from parallel3d.trainer.build import RunLanes, prepare_rank
from parallel3d.trainer.context import Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.resume import state_to_json
from parallel3d.trainer.step import evaluate, train_step
from tests.support import tiny_runs

SEQUENCE_LENGTH = 32


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run that has ended."""

    folder: Path
    checkpoint: Path
    config: Config
    corpus: Corpus
    evaluation_loss: float


def train_and_save(directory: Path, *, steps: int = 2, **changes) -> SavedRun:
    """Trains in threads on 2 x 2 ranks, evaluates and saves."""
    config = tiny_runs.make_config(
        model=dict(initializer_range=0.2, max_position_embeddings=64),
        parallel=dict(tp_size=2, pp_size=2),
        precision=dict(policy="fp32"),
        batch=dict(global_batch_size=4, micro_batch_size=2, sequence_length=SEQUENCE_LENGTH),
        run=dict(evaluate_batches=2, directory=str(directory / "run"), num_steps=steps),
        **changes,
    )
    corpus = open_run_corpus(config, AbortToken(), lambda text: None)
    grid = build_grid(config)

    def body(rank: int, world: ThreadWorld):
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        lanes = RunLanes(
            train=build_reader(config, corpus),
            evaluate=build_evaluation_lanes(config, corpus),
            eos_id=corpus.train.eos_id,
        )
        context = prepare_rank(
            config, rank, grid, make_stage=make_stage, lanes=lanes, device=torch.device("cpu"), initial=None
        )
        start_rank(context, grid, transports)
        for _ in range(steps):
            train_step(context)
        loss = evaluate(context).loss
        return loss, take_snapshot(context.optimizer, tp=context.tp_shard), state_to_json(context.state)

    losses, snapshots, states = zip(*run_threads(len(grid.ranks), body, world=ThreadWorld(len(grid.ranks))))
    facts = RunFacts(state=states[0], config=config.model_dump(), text=fingerprint_data(config, corpus))
    checkpoints = CheckpointDirectory(directory / "run" / "checkpoints")
    partial = checkpoints.partial_path(steps, 0)
    checkpoints.remove_leftovers(keep=partial)
    for rank, snapshot in enumerate(snapshots):
        write_rank_files(checkpoints.disk, partial, rank, snapshot)
    publish(checkpoints, partial, steps, range(len(snapshots)), facts)
    checkpoints.set_link("latest", steps)
    return SavedRun(
        folder=directory / "run",
        checkpoint=checkpoints.path_of(steps),
        config=config,
        corpus=corpus,
        evaluation_loss=losses[0],
    )


def write_sources(folder: Path) -> dict[str, list[str]]:
    """Two files of programs, and lines of JSON: two domains."""
    library = Path(os.__file__).parent
    texts = {name: (library / f"{name}.py").read_text() for name in ("abc", "bisect", "colorsys")}
    for name in ("abc", "bisect"):
        (folder / f"{name}.txt").write_text(texts[name])
    lines = [json.dumps({"text": line}) for line in texts["colorsys"].splitlines() if line.strip()]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    code = [str(folder / f"{name}.txt") for name in ("abc", "bisect")]
    return {"code": code, "lines": [str(folder / "lines.jsonl")]}


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory) -> SavedRun:
    directory = tmp_path_factory.mktemp("evaluated")
    blend = dict(sources=write_sources(directory), stages=[dict(weights={"code": 0.5, "lines": 0.5})])
    data = dict(
        blend=blend,
        document_chars=200,
        validation_fraction=0.3,
        tokenizer=dict(kind="bytes"),
        cache_directory=str(directory / "cache"),
    )
    return train_and_save(directory, data=data)
