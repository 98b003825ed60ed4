"""One place that turns sizes into a run, in threads or on real processes."""

import pytest
import torch

from models.llama import make_llama_stage
from parallel3d.config.load import check_config, resolve
from parallel3d.config.schema import Config
from parallel3d.data.lanes import Lanes
from parallel3d.trainer.build import build_grid, build_rank
from parallel3d.trainer.verify import run_in_threads


def make_config(*, world_size=None, **changes):
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
        run=dict(num_steps=3, evaluate_batches=1),
    )
    for section, values in changes.items():
        sections[section] = {**sections[section], **values}
    config = Config(**sections)
    config = resolve(config, config_path="test.json", world_size=world_size)
    check_config(config)
    return config


@pytest.fixture(scope="session", name="make_config")
def make_config_fixture():
    return make_config


@pytest.fixture(scope="session")
def run_layout(topics, byte_tokenizer):
    """run_layout(steps=3, slots=3, **sections) -> LayoutRun in threads."""

    def run(*, steps=3, slots=3, **changes):
        config = make_config(**changes)
        grid = build_grid(config)

        def build(rank, transports):
            return build_rank(
                config,
                rank,
                grid,
                epoch=0,
                transports=transports,
                make_stage=make_llama_stage,
                train_lanes=Lanes(topics, byte_tokenizer, config.run.seed, config.batch.global_batch_size),
                evaluate_lanes=Lanes(topics, byte_tokenizer, config.run.seed + 1, 5),
                device=torch.device("cpu"),
            )

        return run_in_threads(grid, build, steps, slots=slots)

    return run
