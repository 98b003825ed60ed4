"""DeepSpeed's JSON file (`deepspeed --deepspeed_config`) as overrides of a configuration.

    read_deepspeed(path, dp_size) -> DeepSpeedSettings: overrides (section.field=value), and notices

What the file says becomes fields of ours with the same meaning, DeepSpeed's defaults included where it names an
optimizer or a schedule. Hints about memory and buffers, which change no number, are named in one notice. Everything
else is refused by its name, all at once. A value "auto" leaves the field to the configuration. Names and defaults are
those of DeepSpeed's documentation (deepspeed.ai, "DeepSpeed Configuration JSON") and, where it has none, of its code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parallel3d.config.json_file import read_json
from parallel3d.errors import ConfigError, Problem

AUTO = "auto"
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


@dataclass(kw_only=True)
class DeepSpeedSettings:
    """Fields of ours, and what to say about the rest."""

    fields: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @property
    def overrides(self) -> list[str]:
        return [f"{name}={json.dumps(value)}" for name, value in self.fields.items()]

    def refuse(self, name: str, value: object, rule: str, fix: str) -> None:
        self.problems.append(Problem(field=name, value=value, rule=rule, fix=fix))


def read_deepspeed(path: str | Path, dp_size: int | None) -> DeepSpeedSettings:
    """Returns the settings in the file; `dp_size`: the configuration's replicas, if it names them. Raises ConfigError
    with everything that has no counterpart."""
    return map_deepspeed(read_json(Path(path)), dp_size)


def map_deepspeed(raw: Mapping[str, Any], dp_size: int | None) -> DeepSpeedSettings:
    """The same for the file's content. Pure."""
    settings = DeepSpeedSettings()
    given = {name: value for name, value in raw.items() if value != AUTO and not _is_off(value)}
    _map_batch(settings, given, dp_size)
    for name, map_block in MAPPED.items():  # in this order: the learning rate of a schedule wins
        if name in given:
            map_block(settings, given[name])
    for name, value in given.items():
        if name in MAPPED:
            continue
        if name in HINTS:
            settings.ignored.append(name)
        elif name not in BATCH:
            settings.refuse(name, value, *_why_refused(name))
    if "bf16" in given and "fp16" in given:
        settings.refuse("fp16", given["fp16"], "excludes bf16", "Enable one of the two")
    if settings.problems:
        raise ConfigError(settings.problems)
    if settings.ignored:
        settings.notices.append(f"no effect here: {', '.join(settings.ignored)}")
    return settings


def _is_off(value: object) -> bool:
    is_disabled = isinstance(value, Mapping) and value.get("enabled") is False
    return value is None or value is False or value == {} or is_disabled


def _why_refused(name: str) -> tuple[str, str]:
    if name in REFUSED:
        return "has no counterpart", f"Remove it: {REFUSED[name]}"
    near = get_close_matches(name, [*MAPPED, *BATCH, *HINTS], n=1)
    return "is unknown", f"Did you mean {near[0]}?" if near else "Remove it"


def _values(block: object) -> dict[str, Any]:
    """A block without what is left to the configuration."""
    items = block.items() if isinstance(block, Mapping) else ()
    return {name: value for name, value in items if value != AUTO and value is not None}


# --- the batch --------------------------------------------------------------------------------------------------------

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _map_batch(settings: DeepSpeedSettings, given: Mapping[str, Any], dp_size: int | None) -> None:
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas: any two give the
    third, and the replicas where all three are given."""
    total, micro, steps = sizes = [given.get(name) for name in BATCH]
    for name, value in zip(BATCH, sizes):
        if value is not None and not (isinstance(value, int) and value > 0):
            settings.refuse(name, value, "must be a positive integer", "Correct it")
            return
    if sizes == [None] * 3:
        return
    if steps is not None and None in (total, micro) and dp_size is None:
        rule = "counts micro-batches of one replica, and the number of replicas is not known"
        settings.refuse(BATCH[2], steps, rule, "Set parallel.dp_size, or give the other two sizes")
        return
    if total is not None and micro is not None and steps is not None:
        replicas, rest = divmod(total, micro * steps)
        if rest or dp_size not in (None, replicas):
            have = f"{dp_size} replicas (parallel.dp_size)" if dp_size and not rest else "a whole number of replicas"
            rule = f"must be {BATCH[1]} ({micro}) x {BATCH[2]} ({steps}) x {have}"
            settings.refuse(BATCH[0], total, rule, "Remove one of the three")
            return
        settings.fields["parallel.dp_size"] = replicas
    per_micro = (dp_size or 1) * (steps or 1)
    if total is None and micro is not None and steps is not None:
        total = micro * per_micro
    if micro is None and total is not None and steps is not None:
        if total % per_micro:
            rule = f"must be a multiple of {BATCH[2]} ({steps}) x {dp_size} replicas (parallel.dp_size)"
            settings.refuse(BATCH[0], total, rule, "Change it")
            return
        micro = total // per_micro
    known = {"global_batch_size": total, "micro_batch_size": micro}
    settings.fields |= {f"batch.{name}": value for name, value in known.items() if value is not None}
    if None not in known.values():
        settings.fields["batch.num_micro_batches"] = None  # it follows


# --- number formats ---------------------------------------------------------------------------------------------------


def _map_bf16(settings: DeepSpeedSettings, block: object) -> None:
    settings.fields["precision.policy"] = "bf16"
    for name in _values(block).keys() - {"enabled", "immediate_grad_update", "check_grad_overflow"}:
        settings.refuse(f"bf16.{name}", _values(block)[name], "has no counterpart", "Use precision.policy")


def _map_fp16(settings: DeepSpeedSettings, block: object) -> None:
    values: dict[str, Any] = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000}
    values |= {"min_loss_scale": 1, **_values(block)}
    static = values["loss_scale"]
    settings.fields["precision.policy"] = "fp16"
    settings.fields["precision.loss_scale"] = {
        "initial": float(static or 2 ** values["initial_scale_power"]),
        "growth_interval": None if static else values["loss_scale_window"],
        "backoff_factor": 1.0 if static else 0.5,
        "min": 1.0 if static else float(values["min_loss_scale"]),
    }
    if not static and values.get("hysteresis", 2) != 1:
        settings.notices.append("fp16.hysteresis is 1 here: the loss scale falls at the first overflow")
    known = {"enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"}
    known |= {"consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"}
    for name in values.keys() - known:
        settings.refuse(f"fp16.{name}", values[name], "is unknown", "Remove it")
    for name in ("auto_cast", "fp16_master_weights_and_grads"):
        if values.get(name):
            settings.refuse(f"fp16.{name}", True, "has no counterpart", "Remove it, or use precision.policy")


# --- memory -----------------------------------------------------------------------------------------------------------


def _map_zero(settings: DeepSpeedSettings, block: object) -> None:
    values = _values(block)
    stage = values.get("stage", 0)
    if stage in (0, 1):
        settings.fields["parallel.zero_stage"] = stage
    else:
        fix = "Use 1; what 2 and 3 save, pipeline and tensor parallelism save here (parallel.pp_size, parallel.tp_size)"
        settings.refuse("zero_optimization.stage", stage, "must be 0 or 1", fix)
    for name, value in values.items():
        if name in ZERO_HINTS:
            settings.ignored += [] if name == "stage" else [f"zero_optimization.{name}"]
        elif not (_is_off(value) or (isinstance(value, Mapping) and value.get("device") == "none")):
            fix = "Remove it: nothing is offloaded" if "offload" in name else "Remove it"
            settings.refuse(f"zero_optimization.{name}", value, "has no counterpart", fix)


def _map_checkpointing(settings: DeepSpeedSettings, block: object) -> None:
    settings.fields["parallel.recompute"] = "full"
    for name, value in _values(block).items():
        if name == "cpu_checkpointing" and value:
            settings.refuse(f"activation_checkpointing.{name}", value, "has no counterpart", "Remove it")
        elif name in CHECKPOINTING_HINTS:
            settings.ignored.append(f"activation_checkpointing.{name}")
        elif name != "cpu_checkpointing":
            settings.refuse(f"activation_checkpointing.{name}", value, "is unknown", "Remove it")


# --- the update and its schedule --------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adamw", {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}),
    "adamw": ("adamw", {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}),
    "lion": ("lion", {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0}),
}
"""DeepSpeed's types in small letters: our update rule, and the defaults of its fused kernels."""
TORCH_WEIGHT_DECAY = 0.01
"""The default with torch_adam: that of torch's AdamW."""
IMPLEMENTATIONS = {"torch_adam", "adam_w_mode", "fused", "foreach", "set_grad_none", "bias_correction", "amsgrad"}


def _map_optimizer(settings: DeepSpeedSettings, block: object) -> None:
    kind = str(_values(block).get("type", ""))
    if kind.lower() not in OPTIMIZERS:
        settings.refuse("optimizer.type", kind, "must be Adam, AdamW or Lion", "Use one of them, or optimizer.kind")
        return
    rule, defaults = OPTIMIZERS[kind.lower()]
    params = _values(_values(block).get("params"))
    values = defaults | ({"weight_decay": TORCH_WEIGHT_DECAY} if params.get("torch_adam") else {}) | params
    settings.fields["optimizer.kind"] = rule
    named = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "eps"}
    settings.fields |= {f"optimizer.{ours}": values[name] for name, ours in named.items() if name in values}
    settings.fields |= {f"optimizer.beta{number}": beta for number, beta in enumerate(values["betas"], start=1)}
    if kind.lower() == "adam" and values.get("adam_w_mode") is False and values["weight_decay"]:
        rule_text = "is L2 regularisation without adam_w_mode; weight decay is decoupled here"
        settings.refuse("optimizer.params.weight_decay", values["weight_decay"], rule_text, "Use AdamW, or 0")
    if values.get("bias_correction") is False or values.get("amsgrad"):
        settings.refuse("optimizer.params", values, "has no counterpart", "Remove bias_correction and amsgrad")
    for name in values.keys() - defaults.keys() - IMPLEMENTATIONS:
        settings.refuse(f"optimizer.params.{name}", values[name], "is unknown", "Remove it")


SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _map_scheduler(settings: DeepSpeedSettings, block: object) -> None:
    kind = str(_values(block).get("type", ""))
    if kind not in SCHEDULES:
        settings.refuse("scheduler.type", kind, f"must be {', '.join(SCHEDULES)}", "Use one of them, or lr_schedule")
        return
    values: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log", "cos_min_ratio": 1e-4}
    values |= {"warmup_max_lr": 1e-3} if kind == "WarmupDecayLR" else {}
    values |= _values(_values(block).get("params"))
    if values["warmup_type"] != "linear":
        fix = 'Write "warmup_type": "linear" (the default there is log)'
        settings.refuse("scheduler.params.warmup_type", values["warmup_type"], "must be linear", fix)
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if values.get(name):
            settings.refuse(f"scheduler.params.{name}", values[name], "must be 0: warmups begin at 0", "Use 0")
    settings.fields["lr_schedule.kind"] = SCHEDULES[kind]
    settings.fields["lr_schedule.warmup_steps"] = values["warmup_num_steps"]
    if kind != "WarmupLR":
        settings.fields["lr_schedule.decay_steps"] = values.get("total_num_steps")
        settings.fields["lr_schedule.min_ratio"] = values["cos_min_ratio"] if kind == "WarmupCosineLR" else 0.0
    if "warmup_max_lr" in values:
        settings.fields["optimizer.learning_rate"] = values["warmup_max_lr"]
    known = {"warmup_num_steps", "warmup_type", "cos_min_ratio", "warmup_min_lr", "warmup_min_ratio", "warmup_max_lr"}
    for name in values.keys() - known - {"total_num_steps", "last_batch_iteration"}:
        settings.refuse(f"scheduler.params.{name}", values[name], "is unknown", "Remove it")


# --- the rest ---------------------------------------------------------------------------------------------------------


def _check_formats(settings: DeepSpeedSettings, value: object) -> None:
    """`data_types`, `communication_data_type`: gradients are summed in the policy's format, fp32 for bf16 and fp16."""
    for found in value.values() if isinstance(value, Mapping) else [value]:
        if found not in (AUTO, None, "fp32"):
            settings.refuse("data_types or communication_data_type", found, "must be fp32", "Use precision.policy")


def _map_clipping(settings: DeepSpeedSettings, value: object) -> None:
    settings.fields["optimizer.max_grad_norm"] = value or None


def _map_curriculum(settings: DeepSpeedSettings, block: object) -> None:
    settings.fields["curriculum_learning"] = block


def _map_tensorboard(settings: DeepSpeedSettings, block: object) -> None:
    settings.fields["monitor.tensorboard"] = True


def _map_wandb(settings: DeepSpeedSettings, block: object) -> None:
    settings.fields["monitor.trackers"] = ["wandb"]


MAPPED: dict[str, Callable[[DeepSpeedSettings, object], None]] = {
    "bf16": _map_bf16,
    "bfloat16": _map_bf16,
    "fp16": _map_fp16,
    "zero_optimization": _map_zero,
    "activation_checkpointing": _map_checkpointing,
    "optimizer": _map_optimizer,
    "scheduler": _map_scheduler,
    "gradient_clipping": _map_clipping,
    "data_types": _check_formats,
    "communication_data_type": _check_formats,
    "curriculum_learning": _map_curriculum,
    "tensorboard": _map_tensorboard,
    "wandb": _map_wandb,
}


def deepspeed_overrides(path: str, config_path: str | Path, overrides: list[str]) -> tuple[list[str], list[str]]:
    """Overrides that begin with those of the DeepSpeed file, so that the command line's win; and notices."""
    dp_size = _dp_size(Path(config_path), overrides)
    settings = read_deepspeed(path, dp_size)
    return [*settings.overrides, *overrides], [f"{path}: {notice}" for notice in settings.notices]


def _dp_size(config_path: Path, overrides: list[str]) -> int | None:
    value = read_json(config_path).get("parallel", {}).get("dp_size")
    for override in overrides:
        name, _, text = override.partition("=")
        if name == "parallel.dp_size":
            value = int(text) if text.isdigit() else None
    return value if isinstance(value, int) else None
