"""Warnings about valid settings: each alone, and none for sound configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.load import load_config, resolve
from parallel3d.config.warnings import warnings
from tests.config.test_data_rules import blend, stages
from tests.config.test_derived import config
from tests.config.test_warmup_builder import LINEAR, resolved
from tests.support.config_files import TINY, write


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"parallel": {"pp_size": 8, "dp_size": 2}}, "idle for 64%"),  # (8 - 1) / (8 / 2 + 8 - 1)
        ({"parallel": {"dp_size": 3}}, "[3] replicas"),
        (
            {"parallel": {"pp_size": 3, "schedule": "interleaved", "virtual_stages": 2}},
            "made for a multiple of parallel.pp_size",
        ),
        ({"parallel": {"sequence_parallel": True}}, "sequence_parallel"),
        ({"model": {"architecture": "gpt2"}, "run": {"compile": "elementwise"}}, "no effect on gpt2"),
        ({"data": {"slice": {}, "num_processes": 1}}, "no effect on data.slice"),
        ({"run": {"device": "cuda_shared", "num_steps": 100}, "elastic": {"balance": True}}, "run.device cuda_shared"),
        ({"lr_schedule": {"decay_steps": 50}}, "from 50 steps of 100"),
        ({"lr_schedule": {"decay_tokens": 10_000}}, "from 10,000 tokens of 12,800"),
        ({"lr_schedule": {"warmup_steps": 100}}, "within its warmup"),
        ({"lr_schedule": {"warmup_tokens": 12_800}}, "within its warmup of 12,800 tokens"),
        ({"parallel": {"dp_size": 2}, "elastic": {"enabled": True, "zero_backups": 0}}, "without backups"),
        ({"parallel": {"pp_size": 2, "stage_replicas": [1, 2]}, "elastic": {"enabled": True}}, "stages [0] have one"),
        ({"run": {"initialize_from": ".", "num_steps": 100}}, "set data.tokenizer.path to the Hugging Face folder or"),
        ({"precision": {"loss_scale": {"initial": 2.0}}}, "no effect on policy fp32"),
        ({"precision": {"policy": "bf16_sr"}, "optimizer": {"learning_rate": 1e-3, "beta2": 0.99}}, "beta2 0.99"),
        ({"precision": {"policy": "bf16_pure"}, "optimizer": {"learning_rate": 1e-3, "beta2": 0.999}}, "beta2 0.999"),
    ],
)
def test_each_warning_alone(sections: dict[str, dict[str, Any]], word: str):
    (warning,) = warnings(config(**sections))
    assert word in warning


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"tp_size": 2, "pp_size": 4, "dp_size": 2}, "elastic": {"enabled": True}},
        {"precision": {"policy": "bf16"}, "optimizer": {"learning_rate": 1e-3, "beta2": 0.999}},  # moments in fp32
        {"precision": {"policy": "bf16_sr"}},
    ],
)
def test_no_warning_for_a_sound_configuration(sections: dict[str, dict[str, Any]]):
    assert warnings(config(**sections)) == []


@pytest.mark.parametrize(
    ("warmup", "word"),
    [
        ({"sequence_length": LINEAR, "batch_size": {"start": 32, "duration": 9}}, "use one of them"),
        ({"sequence_length": LINEAR | {"multiple": 4}}, "aren't multiples of 8"),
        ({"sequence_length": LINEAR | {"end": 512}}, "the warmup ends at 512"),
        ({"sequence_length": {"kind": "discrete", "lengths": [128, 512], "until": [9000]}}, "the warmup ends at 512"),
        ({"sequence_length": LINEAR | {"duration": 50_000}}, "the run ends after 40000 steps"),
        ({"batch_size": {"start": 32, "duration": 50_000}}, "before warmup.batch_size.duration (50000)"),
    ],
)
def test_each_warning_about_a_warmup(warmup: dict[str, Any], word: str):
    (warning,) = warnings(resolved(warmup=warmup))
    assert word in warning


def test_a_warmup_that_ends_at_the_full_length_has_no_warning():
    warmup = {"sequence_length": {"kind": "periodic", "lengths": [128, 1024], "until": [900, 1000]}}
    assert warnings(resolved(warmup=warmup)) == []


def test_a_warning_names_rare_sources(tmp_path: Path):
    path = write(tmp_path, TINY)
    rare, usual = (
        resolve(load_config(path, [text]), config_path=path)
        for text in (blend(stages=stages((0, {"web": 0.95, "code": 0.05}))), blend())
    )
    assert warnings(rare) == ["stage 0 of data.blend has 0.05 of 'code': 0.4 sequences a step"]
    assert warnings(usual) == []
