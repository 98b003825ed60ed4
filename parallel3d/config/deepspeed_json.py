"""DeepSpeed's JSON file (`deepspeed --deepspeed_config`) as overrides of a configuration.

    deepspeed_overrides(path, config_path, overrides) -> overrides (section.field=value), and notices
    map_deepspeed(raw, own) -> DeepSpeedSettings: the same for the file's content

What the file says becomes fields of ours with the same meaning, DeepSpeed's defaults included where it names an
optimizer or a schedule. Hints about memory and buffers, which change no number, are named in one notice. Everything
else is refused by its name, all at once. A value "auto", at any depth, leaves the field to the configuration. Names and
defaults are those of DeepSpeed's documentation (deepspeed.ai, "DeepSpeed Configuration JSON") and, where it has none,
of its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parallel3d.config.deepspeed_batch import BATCH, map_batch
from parallel3d.config.deepspeed_values import (
    AUTO,
    BETAS,
    COUNT,
    NUMBER,
    OBJECT,
    POSITIVE_INTEGER,
    POSITIVE_NUMBER,
    RATIO,
    SCALE_POWER,
    SWITCH,
    TEXT,
    DeepSpeedBlock,
    DeepSpeedSettings,
    OwnConfig,
)
from parallel3d.config.json_file import apply_override, read_json
from parallel3d.errors import ConfigError

HINTS = {
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_allgather", "checkpoint"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("prescale_gradients", "gradient_predivide_factor", "comms_logger", "flops_profiler", "csv_monitor"),
    *("timers", "load_universal_checkpoint"),
}
"""Top-level fields that change no number, or only where and how something is printed."""
ZERO_HINTS = {
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size"),
    *("contiguous_gradients", "round_robin_gradients", "load_from_fp32_weights", "elastic_checkpoint"),
    *("ignore_unused_parameters", "legacy_stage1", "use_multi_rank_bucket_allreduce", "stage"),
}
CHECKPOINTING_HINTS = {
    *("partition_activations", "contiguous_memory_optimization", "number_checkpoints", "profile"),
    "synchronize_checkpoint_boundary",
}
REFUSED = {
    "amp": "use bf16 or fp16",
    "aio": "state is in memory: nothing is offloaded",
    "sparse_attention": "attention is dense, or has a sliding window (model.sliding_window)",
    "compression_training": "weights are trained as they are",
    "data_efficiency": "use curriculum_learning, warmup.sequence_length or data.blend",
    "elasticity": "remove it: runs go on after losses by themselves (elastic)",
    "autotuning": "compare layouts with `parallel3d plan`",
    "pipeline": "use parallel.pp_size and parallel.schedule",
    "tensor_parallel": "use parallel.tp_size",
    "hybrid_engine": "remove it: a run only trains",
    "moe": "experts are not supported",
    "progressive_layer_drop": "all layers are trained in every step",
    "eigenvalue": "remove it",
    "quantize_training": "use precision.policy",
    "sequence_parallel_size": "use parallel.sequence_parallel with parallel.tp_size",
}
"""Top-level fields that would change what is trained, and what to do instead."""


def deepspeed_overrides(
    path: str, config_path: str | Path, overrides: list[str], world_size: int | None = None
) -> tuple[list[str], list[str]]:
    """Overrides that begin with those of the DeepSpeed file, so that the command line's win; and notices.

    `world_size`: the launcher's ranks, if there is a launcher. Raises one ConfigError with everything that is wrong in
    the file or has no counterpart.
    """
    own = read_json(Path(config_path))
    for override in overrides:
        list(apply_override(own, override))  # the configuration's own check reports its problems
    source = f"{path} (--deepspeed_config)"
    settings = map_deepspeed(read_json(Path(path)), OwnConfig(raw=own, world_size=world_size), source=source)
    return [*settings.overrides, *overrides], [f"{path}: {notice}" for notice in settings.notices]


def map_deepspeed(raw: Mapping[str, Any], own: OwnConfig, source: str = "DeepSpeed's JSON") -> DeepSpeedSettings:
    """The settings in the file's content `raw`, for the configuration `own`. Pure."""
    settings = DeepSpeedSettings(own=own)
    map_batch(settings, raw)
    for name, map_value in VALUES.items():
        if raw.get(name) not in (None, AUTO):
            map_value(settings, name, raw[name])
    given = {name: value for name, value in raw.items() if not _is_left_out(value)}
    for name, map_block in BLOCKS.items():  # in this order: the learning rate of a schedule wins
        if name in given and (values := settings.read(name, given[name], OBJECT)) is not None:
            map_block(DeepSpeedBlock(settings=settings, name=name, values=values))
    for name, value in given.items():
        is_left = isinstance(value, Mapping) and value.get("enabled") == AUTO
        if name in HINTS:
            settings.ignored.append(name)
        elif name not in (*BATCH, *VALUES, *BLOCKS) and not is_left:
            settings.refuse(name, value, *_why_refused(name))
    if settings.problems:
        raise ConfigError(settings.problems, source)
    if settings.ignored:
        settings.notices.append(f"no effect here: {', '.join(settings.ignored)}")
    return settings


def _is_left_out(value: object) -> bool:
    """Whether a value asks for nothing: it is off, or left to the configuration as a whole."""
    if not isinstance(value, Mapping):
        return value is None or value is False or value == AUTO
    return value.get("enabled") is False or all(each is None or each == AUTO for each in value.values())


def _why_refused(name: str) -> tuple[str, str]:
    if name in REFUSED:
        return "has no counterpart", f"Remove it: {REFUSED[name]}"
    near = get_close_matches(name, [*BLOCKS, *VALUES, *BATCH, *HINTS], n=1)
    return "is unknown", f"Did you mean {near[0]}?" if near else "Remove it"


# --- number formats ---------------------------------------------------------------------------------------------------

POLICY = "precision.policy"


def _map_bf16(block: DeepSpeedBlock) -> None:
    if not block.is_on(own=False):  # "auto": the configuration's policy stays, whichever it is
        return
    block.settings.fields[POLICY] = "bf16"
    for name, value in block.given():
        if name in ("enabled", "immediate_grad_update", "check_grad_overflow"):
            block.read(name, SWITCH)
        elif not _is_left_out(value):
            block.refuse(name, "has no counterpart", "Use precision.policy")


def _map_fp16(block: DeepSpeedBlock) -> None:
    settings = block.settings
    policy = settings.fields.get(POLICY, settings.own.value("precision", "policy"))
    if not block.is_on(own=policy == "fp16"):
        return
    if settings.fields.get(POLICY) == "bf16":
        settings.refuse("fp16", block.values, "excludes bf16", "Enable one of the two")
    settings.fields[POLICY] = "fp16"
    _map_loss_scale(block)
    for name in ("auto_cast", "fp16_master_weights_and_grads"):
        if block.read(name, SWITCH):
            block.refuse(name, "has no counterpart", "Remove it, or use precision.policy")
    block.read("consecutive_hysteresis", SWITCH)
    known = {"enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"}
    block.refuse_unknown(known | {"consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"})


def _map_loss_scale(block: DeepSpeedBlock) -> None:
    """A scale that is given never moves; at 0, the default, it does. "auto" leaves that, and with it all that the file
    does not name, to the configuration."""
    settings, scale = block.settings, block.read("loss_scale", NUMBER, 0)
    defaults = {} if scale is None else {"initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1}
    power = block.read("initial_scale_power", SCALE_POWER, defaults.get("initial_scale_power"))
    window = block.read("loss_scale_window", POSITIVE_INTEGER, defaults.get("loss_scale_window"))
    least = block.read("min_loss_scale", POSITIVE_NUMBER, defaults.get("min_loss_scale"))
    hysteresis = block.read("hysteresis", POSITIVE_INTEGER, 2)
    if scale:
        fixed = {"initial": float(scale), "growth_interval": None, "backoff_factor": 1.0, "min": 1.0}
        settings.fields |= {f"precision.loss_scale.{name}": value for name, value in fixed.items()}
        return
    settings.set("precision.loss_scale.initial", None if power is None else 2.0**power)
    settings.set("precision.loss_scale.growth_interval", window)
    settings.set("precision.loss_scale.min", None if least is None else float(least))
    if scale is not None:
        settings.fields |= {"precision.loss_scale.growth_factor": 2.0, "precision.loss_scale.backoff_factor": 0.5}
    if hysteresis not in (1, None):
        settings.notices.append("fp16.hysteresis is 1 here: the loss scale falls at the first overflow")


# --- memory -----------------------------------------------------------------------------------------------------------


def _map_zero(block: DeepSpeedBlock) -> None:
    settings, stage = block.settings, block.values.get("stage") or 0
    if type(stage) is int and stage in (0, 1):
        settings.fields["parallel.zero_stage"] = stage
    elif stage != AUTO:
        fix = "Use 1; what 2 and 3 save, pipeline and tensor parallelism save here (parallel.pp_size, parallel.tp_size)"
        settings.refuse("zero_optimization.stage", stage, "must be 0 or 1", fix)
    for name, value in block.given():
        if name in ZERO_HINTS:
            settings.ignored += [] if name == "stage" else [f"zero_optimization.{name}"]
        elif not (_is_left_out(value) or (isinstance(value, Mapping) and value.get("device") in ("none", AUTO))):
            fix = "Remove it: nothing is offloaded" if "offload" in name else "Remove it"
            block.refuse(name, "has no counterpart", fix)


def _map_checkpointing(block: DeepSpeedBlock) -> None:
    block.settings.fields["parallel.recompute"] = "full"
    for name, value in block.given():
        if name == "cpu_checkpointing" and value:
            block.refuse(name, "has no counterpart", "Remove it")
        elif name in CHECKPOINTING_HINTS:
            block.settings.ignored.append(f"activation_checkpointing.{name}")
        elif name != "cpu_checkpointing":
            block.refuse(name, "is unknown", "Remove it")


# --- the update and its schedule --------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adamw", {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}),
    "adamw": ("adamw", {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}),
    "lion": ("lion", {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0}),
}
"""DeepSpeed's types in small letters: our update rule, and the defaults of its fused kernels."""
TORCH_WEIGHT_DECAY = 0.01
"""The default with torch_adam: that of torch's AdamW."""
PARAMS = {"lr": ("learning_rate", POSITIVE_NUMBER), "weight_decay": ("weight_decay", NUMBER), "eps": ("eps", NUMBER)}
IMPLEMENTATIONS = ("torch_adam", "adam_w_mode", "fused", "foreach", "set_grad_none", "bias_correction", "amsgrad")


def _map_optimizer(block: DeepSpeedBlock) -> None:
    """A type "auto" leaves the update rule, and with it its defaults, to the configuration."""
    settings, kind = block.settings, block.read("type", TEXT, "")
    if kind is not None and kind.lower() not in OPTIMIZERS:
        settings.refuse("optimizer.type", kind, "must be Adam, AdamW or Lion", "Use one of them, or optimizer.kind")
        return
    rule, defaults = (None, {}) if kind is None else OPTIMIZERS[kind.lower()]
    settings.set("optimizer.kind", rule)
    params = block.inner("params")
    if params is None:
        return
    switches = {name: params.read(name, SWITCH) for name in IMPLEMENTATIONS}
    if switches["torch_adam"] and defaults:
        defaults = defaults | {"weight_decay": TORCH_WEIGHT_DECAY}
    read = {name: params.read(name, kind_of, defaults.get(name)) for name, (_, kind_of) in PARAMS.items()}
    for name, (ours, _) in PARAMS.items():
        settings.set(f"optimizer.{ours}", read[name])
    for number, beta in enumerate(params.read("betas", BETAS, defaults.get("betas")) or (), start=1):
        settings.fields[f"optimizer.beta{number}"] = beta
    is_left = params.is_auto("weight_decay")
    decays = settings.own.value("optimizer", "weight_decay") != 0 if is_left else bool(read["weight_decay"])
    if switches["adam_w_mode"] is False and decays and kind is not None and kind.lower() == "adam":
        rule_text = "is L2 regularisation without adam_w_mode; weight decay is decoupled here"
        params.refuse("weight_decay", rule_text, "Use AdamW, or 0")
    for name, refused in (("bias_correction", False), ("amsgrad", True)):
        if switches[name] is refused:
            params.refuse(name, "has no counterpart", "Remove it")
    params.refuse_unknown({"betas", *(defaults or PARAMS), *IMPLEMENTATIONS})


SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _map_scheduler(block: DeepSpeedBlock) -> None:
    """A type "auto" leaves the schedule, and with it its defaults, to the configuration."""
    settings, kind = block.settings, block.read("type", TEXT, "")
    if kind is not None and kind not in SCHEDULES:
        settings.refuse("scheduler.type", kind, f"must be {', '.join(SCHEDULES)}", "Use one of them, or lr_schedule")
        return
    settings.set("lr_schedule.kind", kind and SCHEDULES[kind])
    params = block.inner("params")
    if params is None:
        return
    defaults: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log", "cos_min_ratio": 1e-4} if kind else {}
    defaults |= {"warmup_max_lr": 1e-3} if kind == "WarmupDecayLR" else {}
    if (warmup_type := params.read("warmup_type", TEXT, defaults.get("warmup_type"))) not in (None, "linear"):
        fix = 'Write "warmup_type": "linear" (the default there is log)'
        settings.refuse("scheduler.params.warmup_type", warmup_type, "must be linear", fix)
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if params.read(name, NUMBER):
            params.refuse(name, "must be 0: warmups begin at 0", "Use 0")
    total = params.read("total_num_steps", POSITIVE_INTEGER)
    ratio = params.read("cos_min_ratio", RATIO, defaults.get("cos_min_ratio"))
    if kind != "WarmupLR":
        settings.set("lr_schedule.decay_steps", total)
        settings.set("lr_schedule.min_ratio", 0.0 if kind == "WarmupDecayLR" else ratio)
    warmup = params.read("warmup_num_steps", COUNT, defaults.get("warmup_num_steps"))
    settings.set("lr_schedule.warmup_steps", warmup)
    peak = params.read("warmup_max_lr", POSITIVE_NUMBER, defaults.get("warmup_max_lr"))
    settings.set("optimizer.learning_rate", peak)
    known = {"warmup_num_steps", "warmup_type", "cos_min_ratio", "warmup_min_lr", "warmup_min_ratio", "warmup_max_lr"}
    params.refuse_unknown(known | {"total_num_steps", "last_batch_iteration"})


# --- the rest ---------------------------------------------------------------------------------------------------------


def _map_curriculum(block: DeepSpeedBlock) -> None:
    """The block as it is, its "auto" replaced by what the configuration's block of the same name has."""
    own = block.settings.own.raw.get("curriculum_learning")
    own = own if isinstance(own, Mapping) else {}
    if block.is_on(own=own.get("enabled") is True):
        block.settings.fields["curriculum_learning"] = _without_auto(block.values, own)


def _without_auto(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each "auto" replaced by its value in `own`, or left out where that has none."""
    filled: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            below = own.get(name)
            filled[name] = _without_auto(value, below if isinstance(below, Mapping) else {})
        elif value != AUTO:
            filled[name] = value
        elif name in own:
            filled[name] = own[name]
    return filled


def _map_tensorboard(block: DeepSpeedBlock) -> None:
    if block.is_on(own=False):
        block.settings.fields["monitor.tensorboard"] = True
        fix = "Remove it: run.directory holds the files"
        _refuse_all_but(block, {"enabled"}, {"output_path": fix, "job_name": fix})


def _map_wandb(block: DeepSpeedBlock) -> None:
    if block.is_on(own=False):
        block.settings.fields["monitor.trackers"] = ["wandb"]
        block.settings.set("monitor.tracker_project", block.read("project", TEXT))
        variables = {"team": "WANDB_ENTITY", "group": "WANDB_RUN_GROUP"}
        fixes = {name: f"Remove it, and set {other} in the environment" for name, other in variables.items()}
        _refuse_all_but(block, {"enabled", "project"}, fixes)


def _refuse_all_but(block: DeepSpeedBlock, known: set[str], fixes: Mapping[str, str]) -> None:
    """Refuses what is not known, and what has a fix unless it is empty, which is DeepSpeed's default."""
    for name, value in block.given():
        if name in fixes and value != "":
            block.refuse(name, "has no counterpart", fixes[name])
    block.refuse_unknown(known | fixes.keys())


def _check_formats(settings: DeepSpeedSettings, name: str, value: object) -> None:
    """`data_types`, `communication_data_type`: gradients are summed in the policy's format, fp32 for bf16 and fp16."""
    formats = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
    for field, found in formats.items():
        if found not in (AUTO, None, "fp32"):
            settings.refuse(field, found, "must be fp32", "Use precision.policy")


def _map_clipping(settings: DeepSpeedSettings, name: str, value: object) -> None:
    if (norm := settings.read(name, value, NUMBER)) is not None:
        settings.fields["optimizer.max_grad_norm"] = norm or None


VALUES: dict[str, Callable[[DeepSpeedSettings, str, object], None]] = {
    "gradient_clipping": _map_clipping,
    "data_types": _check_formats,
    "communication_data_type": _check_formats,
}
BLOCKS: dict[str, Callable[[DeepSpeedBlock], None]] = {
    "bf16": _map_bf16,
    "bfloat16": _map_bf16,
    "fp16": _map_fp16,
    "zero_optimization": _map_zero,
    "activation_checkpointing": _map_checkpointing,
    "optimizer": _map_optimizer,
    "scheduler": _map_scheduler,
    "curriculum_learning": _map_curriculum,
    "tensorboard": _map_tensorboard,
    "wandb": _map_wandb,
}
