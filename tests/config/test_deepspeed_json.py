"""DeepSpeed's JSON file becomes fields of a configuration, or is refused by name."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.config.deepspeed_json import deepspeed_overrides, map_deepspeed
from parallel3d.config.deepspeed_values import OwnConfig
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


def test_trackers(own: Path):
    on = {"wandb": {"enabled": True, "project": "mine"}, "tensorboard": {"enabled": True, "output_path": ""}}
    config, notices = mapped(own, on)
    assert (config.monitor.trackers, config.monitor.tracker_project, notices) == (["wandb"], "mine", [])
    assert config.monitor.tensorboard


@pytest.mark.parametrize(
    ("block", "field", "fix"),
    [
        ({"wandb": {"enabled": True, "team": "us"}}, "wandb.team", "WANDB_ENTITY"),
        ({"wandb": {"enabled": True, "group": "g"}}, "wandb.group", "WANDB_RUN_GROUP"),
        ({"wandb": {"enabled": True, "projekt": "p"}}, "wandb.projekt", "Remove it"),
        ({"tensorboard": {"enabled": True, "output_path": "logs/"}}, "tensorboard.output_path", "run.directory"),
        ({"tensorboard": {"enabled": True, "every": 5}}, "tensorboard.every", "Remove it"),
    ],
)
def test_what_trackers_have_no_counterpart_of_is_refused(own: Path, block: dict[str, Any], field: str, fix: str):
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")) as caught:
        mapped(own, block)
    assert fix in str(caught.value)


def test_the_command_lines_overrides_win(own: Path):
    config, _ = mapped(own, COMPLETE, "optimizer.learning_rate=0.5", "precision.policy=fp32")
    assert (config.optimizer.learning_rate, config.precision.policy) == (0.5, "fp32")


def test_auto_and_what_is_off_leave_the_configuration_as_it_is(own: Path):
    off = {"train_batch_size": "auto", "fp16": {"enabled": False}, "amp": {"enabled": False}, "bf16": "auto"}
    config, notices = mapped(own, off | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    assert (config.batch.num_micro_batches, config.precision.policy, notices) == (8, "fp32", [])
    assert config.optimizer.learning_rate == 1e-2  # the configuration's
    assert config.optimizer.weight_decay == 0.0  # absent in the file: DeepSpeed's default


FP16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
HUGGING_FACES = {
    "fp16": {"enabled": "auto", **FP16},
    "bf16": {"enabled": "auto"},
    "amp": {"enabled": "auto", "opt_level": "O1"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_type": "linear",
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "offload_optimizer": {"device": "auto"}},
    "activation_checkpointing": {"partition_activations": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
"""Its documentation's file, all of it left to the configuration."""


def test_hugging_faces_file_leaves_all_to_the_configuration(own: Path):
    """But what it names: the update rule, and a schedule that decays linearly to 0."""
    words = ("lr_schedule.warmup_steps=7", "lr_schedule.decay_steps=90", "parallel.zero_stage=1")
    config, notices = mapped(own, HUGGING_FACES, *words)
    before = resolve(load_config(own, words), config_path=own).model_dump()
    before["lr_schedule"] |= {"kind": "linear", "min_ratio": 0.0}
    assert config.model_dump() == before and notices == []


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16", "bf16_sr"])
def test_a_format_that_is_auto_is_the_configurations(own: Path, policy: str):
    raw = {"fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 5}, "bf16": {"enabled": "auto"}}
    precision = mapped(own, raw, f"precision.policy={policy}")[0].precision
    assert (precision.policy, precision.loss_scale.initial) == (policy, 2.0 ** (5 if policy == "fp16" else 16))
    precision = mapped(own, raw | {"bf16": {"enabled": True}})[0].precision
    assert precision.policy == "bf16"  # fp16 is not in its way


def test_auto_inside_blocks_is_the_configurations(own: Path):
    loss_scale = ("precision.loss_scale.initial=64", "precision.loss_scale.growth_interval=7")
    fp16 = {"enabled": True, "initial_scale_power": "auto", "loss_scale_window": 9}
    scale = mapped(own, {"fp16": fp16}, loss_scale[0])[0].precision.loss_scale
    assert (scale.initial, scale.growth_interval) == (64, 9)
    scale = mapped(own, {"fp16": {"enabled": True, "loss_scale": "auto"}}, *loss_scale)[0].precision.loss_scale
    assert (scale.initial, scale.growth_interval) == (64, 7)
    adam = {"type": "auto", "params": {"lr": 3e-4}}
    optimizer = mapped(own, {"optimizer": adam}, "optimizer.kind=lion")[0].optimizer
    assert (optimizer.kind, optimizer.learning_rate, optimizer.weight_decay) == ("lion", 3e-4, 0.1)
    steps = {"total_curriculum_step": "auto", "difficulty_step": 8}
    curriculum = {**COMPLETE["curriculum_learning"], "min_difficulty": "auto", "schedule_config": steps}
    words = ("curriculum_learning.min_difficulty=16", "curriculum_learning.schedule_config.total_curriculum_step=50")
    length = mapped(own, {"curriculum_learning": curriculum}, *words)[0].warmup.sequence_length
    assert (length.start, length.duration) == (16, 50)
    assert mapped(own, {"curriculum_learning": {**curriculum, "enabled": "auto"}})[0] == mapped(own, {})[0]


@pytest.mark.parametrize(("given", "rate"), [({}, 1e-3), ({"warmup_max_lr": "auto"}, 1e-2)])
def test_the_peak_of_a_decaying_schedule(own: Path, given: dict[str, Any], rate: float):
    """DeepSpeed's default without the key; "auto" is the configuration's. total_num_steps has no default: without it
    the decay ends where the configuration has it end."""
    params = {"warmup_type": "linear", "warmup_num_steps": 5, **given}
    raw = {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    config = mapped(own, raw, "lr_schedule.decay_steps=90")[0]
    assert (config.optimizer.learning_rate, config.lr_schedule.decay_steps) == (rate, 90)


def test_a_block_that_nothing_enables_is_off_as_in_deepspeed(own: Path):
    config, (notice,) = mapped(own, {"fp16": {"loss_scale": 128}})
    assert config.precision.policy == "fp32" and 'fp16 is off, as in DeepSpeed: it has no "enabled": true' in notice


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
        ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, "excludes bf16"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype = 'bf16': must be fp32"),
        ({"communication_data_type": "fp16"}, "must be fp32"),
        ({"train_batchsize": 8}, "Did you mean train_batch_size?"),
    ],
)
def test_what_has_no_counterpart_is_named(own: Path, raw: dict[str, Any], field: str):
    with pytest.raises(ConfigError) as error:
        mapped(own, raw)
    assert field in str(error.value)


def in_fp16(**values: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **values}}


def in_adamw(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


def in_schedule(kind: str = "WarmupDecayLR", **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": {**SCHEDULE, **params}}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"bf16": True}, "bf16 = True: must be an object"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled = 'yes': must be true or false"),
        (in_fp16(initial_scale_power="x"), "fp16.initial_scale_power = 'x': must be an integer from 0 to 127"),
        (in_fp16(initial_scale_power=10**9), "fp16.initial_scale_power = 1000000000: must be an integer from 0 to 127"),
        (in_fp16(loss_scale=True), "fp16.loss_scale = True: must be a number of at least 0"),
        (in_fp16(loss_scale_window=0.5), "fp16.loss_scale_window = 0.5: must be a positive integer"),
        (in_fp16(min_loss_scale=[1]), "fp16.min_loss_scale = [1]: must be a positive number"),
        (in_fp16(hysteresis="2"), "fp16.hysteresis = '2': must be a positive integer"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage = True: must be 0 or 1"),
        ({"zero_optimization": 1}, "zero_optimization = 1: must be an object"),
        ({"optimizer": "AdamW"}, "optimizer = 'AdamW': must be an object"),
        ({"optimizer": {"type": 3}}, "optimizer.type = 3: must be text"),
        ({"optimizer": {"type": "AdamW", "params": 3}}, "optimizer.params = 3: must be an object"),
        (in_adamw(betas=0.9), "optimizer.params.betas = 0.9: must be a list of two numbers from 0 to below 1"),
        (in_adamw(betas=[0.9, 1]), "optimizer.params.betas = [0.9, 1]: must be a list of two numbers"),
        (in_adamw(betas=[0.9] * 3), "optimizer.params.betas = [0.9, 0.9, 0.9]: must be a list of two numbers"),
        (in_adamw(lr="1e-3"), "optimizer.params.lr = '1e-3': must be a positive number"),
        (in_adamw(weight_decay=float("nan")), "optimizer.params.weight_decay = nan: must be a number of at least 0"),
        (in_adamw(eps=10**400), "optimizer.params.eps = 1000"),
        (in_adamw(torch_adam="yes"), "optimizer.params.torch_adam = 'yes': must be true or false"),
        (in_adamw(amsgrad=True), "optimizer.params.amsgrad = True: has no counterpart"),
        (in_schedule(warmup_type=1), "scheduler.params.warmup_type = 1: must be text"),
        (in_schedule(warmup_num_steps=2.5), "scheduler.params.warmup_num_steps = 2.5: must be an integer"),
        (in_schedule(total_num_steps=True), "scheduler.params.total_num_steps = True: must be a positive integer"),
        (in_schedule(warmup_max_lr=[1e-3]), "scheduler.params.warmup_max_lr = [0.001]: must be a positive number"),
        (in_schedule("WarmupCosineLR", cos_min_ratio=2), "scheduler.params.cos_min_ratio = 2: must be a number from 0"),
        ({"gradient_clipping": "x"}, "gradient_clipping = 'x': must be a number of at least 0"),
        ({"gradient_clipping": False}, "gradient_clipping = False: must be a number of at least 0"),
    ],
)
def test_a_wrong_value_is_one_clear_error(own: Path, raw: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        mapped(own, raw)
    assert message in str(error.value) and len(error.value.problems) == 1
    assert str(error.value).startswith(f"{own.parent / 'ds_config.json'} (--deepspeed_config) has 1 problem:")


def test_all_problems_at_once():
    raw = {"aio": {"block_size": 1}, "optimizer": {"type": "SGD"}, "elasticity": {"enabled": True}}
    with pytest.raises(ConfigError) as error:
        map_deepspeed(raw, OwnConfig())
    assert [name in str(error.value) for name in ("aio", "optimizer.type", "elasticity")] == [True] * 3


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
