"""DeepSpeed's JSON file becomes fields of a configuration, or is refused by name."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.config.deepspeed_json import deepspeed_overrides, map_deepspeed
from parallel3d.config.load import load_config, resolve
from parallel3d.errors import ConfigError
from parallel3d.trainer.learning_rate import build_lr_schedule

COMPLETE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 200, "warmup_num_steps": 20, "warmup_type": "linear", "cos_min_ratio": 0.1},
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
    },
    "wall_clock_breakdown": False,
    "tensorboard": {"enabled": False},
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    config = {
        "model": dict(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2),
        "batch": {"sequence_length": 64, "global_batch_size": 8, "num_micro_batches": 8},
        "optimizer": {"learning_rate": 1e-2, "beta2": 0.5},
        "parallel": {"dp_size": 2},
        "run": {"num_steps": 200},
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    return tmp_path / "run.json"


def mapped(own: Path, raw: dict[str, Any], *overrides: str):
    file = own.parent / "ds_config.json"
    file.write_text(json.dumps(raw))
    words, notices = deepspeed_overrides(str(file), own, list(overrides))
    return resolve(load_config(own, words), config_path=own), notices


def test_a_whole_file(own: Path):
    config, (notice,) = mapped(own, COMPLETE)
    batch, optimizer, schedule = config.batch, config.optimizer, config.lr_schedule
    assert (batch.global_batch_size, batch.micro_batch_size, batch.num_micro_batches) == (64, 4, 16)
    assert (config.parallel.zero_stage, config.parallel.recompute, config.precision.policy) == (1, "full", "bf16")
    assert (optimizer.kind, optimizer.learning_rate, optimizer.weight_decay) == ("adamw", 3e-4, 0.1)
    assert (optimizer.settings, optimizer.max_grad_norm) == ({"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}, 0.5)
    assert (schedule.kind, schedule.warmup_steps, schedule.decay_steps, schedule.min_ratio) == ("cosine", 20, 200, 0.1)
    assert config.warmup.sequence_length.end == 64
    hints = ("zero_optimization.overlap_comm", "activation_checkpointing.partition_activations", "steps_per_print")
    assert notice.endswith(f"no effect here: {', '.join(hints)}")


def test_the_command_lines_overrides_win(own: Path):
    config, _ = mapped(own, COMPLETE, "optimizer.learning_rate=0.5", "precision.policy=fp32")
    assert (config.optimizer.learning_rate, config.precision.policy) == (0.5, "fp32")


def test_auto_and_what_is_off_leave_the_configuration_as_it_is(own: Path):
    off = {"train_batch_size": "auto", "fp16": {"enabled": False}, "amp": {"enabled": False}, "bf16": "auto"}
    config, notices = mapped(own, off | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    assert (config.batch.num_micro_batches, config.precision.policy, notices) == (8, "fp32", [])
    assert config.optimizer.learning_rate == 1e-3  # DeepSpeed's default


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, (16, 2, 8)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (12, 2, 6)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (24, 4, 6)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (12, 2, 6)),
    ],
)
def test_two_sizes_of_the_batch_give_the_third(own: Path, sizes: dict[str, int], expected: tuple[int, ...]):
    batch = mapped(own, sizes)[0].batch
    assert (batch.global_batch_size, batch.micro_batch_size, batch.num_micro_batches) == expected


def test_fp16_and_its_loss_scale(own: Path):
    dynamic, (notice,) = mapped(own, {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 50}})
    assert dynamic.precision.policy == "fp16" and "hysteresis" in notice
    scale = dynamic.precision.loss_scale
    assert (scale.initial, scale.growth_interval, scale.backoff_factor, scale.min) == (4096, 50, 0.5, 1)
    scale = mapped(own, {"fp16": {"enabled": True, "loss_scale": 128}})[0].precision.loss_scale
    assert (scale.initial, scale.growth_interval, scale.backoff_factor) == (128, None, 1.0)


SCHEDULE = {"warmup_type": "linear", "warmup_num_steps": 10, "total_num_steps": 100}


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage = 2: must be 0 or 1"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type = 'OneBitAdam'"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}, "L2 regularisation"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "optimizer.params.learning_rate"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type = 'OneCycle'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "warmup_type = 'log': must be linear"),
        ({"scheduler": {"type": "WarmupLR", "params": {**SCHEDULE, "warmup_min_lr": 1e-5}}}, "warmup_min_lr"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "excludes bf16"),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "must be fp32"),
        ({"communication_data_type": "fp16"}, "must be fp32"),
        ({"train_batchsize": 8}, "Did you mean train_batch_size?"),
        ({"train_batch_size": "8"}, "must be a positive integer"),
        ({"train_batch_size": 15, "gradient_accumulation_steps": 4}, "multiple of gradient_accumulation_steps"),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            "x 2 replicas (parallel.dp_size)",
        ),
    ],
)
def test_what_has_no_counterpart_is_named(own: Path, raw: dict[str, Any], field: str):
    with pytest.raises(ConfigError) as error:
        mapped(own, raw)
    assert field in str(error.value)


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as error:
        map_deepspeed({"aio": {"block_size": 1}, "optimizer": {"type": "SGD"}, "elasticity": {"enabled": True}}, None)
    assert [name in str(error.value) for name in ("aio", "optimizer.type", "elasticity")] == [True] * 3


def test_accumulation_needs_the_number_of_replicas():
    with pytest.raises(ConfigError, match="gradient_accumulation_steps = 4.*Set parallel.dp_size"):
        map_deepspeed({"train_batch_size": 64, "gradient_accumulation_steps": 4}, None)


def test_a_schedules_learning_rate_wins(own: Path):
    schedule = {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": 3e-4}}
    config, _ = mapped(own, {"scheduler": schedule, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    assert (config.optimizer.learning_rate, config.lr_schedule.warmup_steps) == (3e-4, 1000)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_learning_rates_are_deepspeeds(own: Path, kind: str):
    """Its own classes. Update number u takes ours at u, theirs two updates later; their cosine is one ahead of that."""
    pytest.importorskip("deepspeed")
    params: dict[str, Any] = {"warmup_type": "linear", "warmup_num_steps": 20}
    params |= {} if kind == "WarmupLR" else {"total_num_steps": 200}
    params |= {} if kind == "WarmupCosineLR" else {"warmup_max_lr": 3e-4}
    raw = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "scheduler": {"type": kind, "params": params}}
    ours = build_lr_schedule(mapped(own, raw)[0])
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = getattr(import_module("deepspeed.runtime.lr_schedules"), kind)(optimizer, **params)
    for update in range(210):
        theirs.step()
        is_ahead = kind == "WarmupCosineLR" and update >= 20
        expected = ours.at(updates=update + is_ahead, tokens=0.0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9, abs=1e-15), update
