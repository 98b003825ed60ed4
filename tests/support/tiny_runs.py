"""Tiny models on texts that every machine has: configurations, ranks, and runs with every rank as a thread."""

from __future__ import annotations

import pydoc_data.topics
from functools import cache, partial

import numpy as np
import torch

from parallel3d.comparison.run_result import RunResult
from parallel3d.config.load import check_config, resolve
from parallel3d.config.schema import Config
from parallel3d.data.blend import BlendedReader, Subset
from parallel3d.data.documents import TokenizedDocuments
from parallel3d.data.lanes import Lanes
from parallel3d.data.reader import Reader
from parallel3d.data.run_data import blend_stages
from parallel3d.data.tokenizer import ByteTokenizer
from parallel3d.inprocess.harness import run_in_threads
from parallel3d.models.make import make_stage
from parallel3d.parallel.grid import Grid
from parallel3d.trainer.build import RunLanes, prepare_rank
from parallel3d.trainer.context import RankContext, Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid


class Texts:
    """Documents in memory: the lines of the interpreter's own help topics, short enough for lanes to cross many."""

    def __init__(self) -> None:
        self.texts = _lines_of_the_topics()

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, number: int) -> str:
        return self.texts[number]


@cache
def _lines_of_the_topics() -> list[str]:
    topics = (pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return [line.strip() for topic in topics for line in topic.splitlines() if line.strip()][:2000]


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
        lr_schedule=dict(warmup_steps=2),
        data=dict(),
        run=dict(num_steps=3, evaluate_batches=1, timeout_s=300.0),
    )
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    config = resolve(Config(**sections), config_path="test.json", world_size=world_size)
    check_config(config)
    return config


def prepare(config: Config, grid: Grid, rank: int, train_lanes=None, **options) -> RankContext:
    """Prepares one rank of a cell on the help topics; `train_lanes` is for tests that watch the reads."""
    return prepare_rank(
        config,
        rank,
        grid,
        make_stage=make_stage,
        lanes=RunLanes(
            train=train_lanes or topic_lanes(config),
            evaluate=Lanes(TokenizedDocuments(Texts(), ByteTokenizer()), config.run.seed + 1, 5),
            eos_id=ByteTokenizer.eos_id,
        ),
        device=torch.device("cpu"),
        **options,
    )


def blend_from(token: int) -> dict:
    """Two sources, of which the second takes over at a token; topic_lanes makes them, whatever the paths are."""
    weights = [{"even": 0.75, "odd": 0.25}, {"even": 0.25, "odd": 0.75}]
    stages = [dict(from_token=start, weights=each) for start, each in zip((0, token), weights)]
    return dict(sources={"even": ["."], "odd": ["."]}, stages=stages)


def build(config: Config, grid: Grid, rank: int, transports: Transports, train_lanes=None) -> RankContext:
    """A rank that has begun, in a world that stays as it is."""
    runtime = prepare(config, grid, rank, train_lanes)
    start_rank(runtime, grid, transports)
    return runtime


def topic_lanes(config: Config) -> Reader:
    """All topics; of a blend each source every n-th line."""
    topics, blend = TokenizedDocuments(Texts(), ByteTokenizer()), config.data.blend
    seed, num_lanes = config.run.seed, config.batch.global_batch_size
    if blend is None:
        return Lanes(topics, seed, num_lanes)
    indices = np.arange(len(topics))
    parts = [Subset(topics, indices[first :: len(blend.sources)]) for first in range(len(blend.sources))]
    return BlendedReader([Lanes(part, seed, num_lanes) for part in parts], blend_stages(blend), seed)


def train_in_threads(*, steps: int = 3, slots: int = 3, **changes) -> RunResult:
    config = make_config(**changes)
    grid = build_grid(config)
    return run_in_threads(grid, partial(build, config, grid), steps, slots=slots)
