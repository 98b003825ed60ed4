"""Rules between fields of the configuration: each names the field to change, its value, the rule and the fix.

A rule says which fields it reads, so that it is left out where one of them is not even of the right form.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import floor, frexp, inf, log2
from pathlib import Path
from typing import Any

from parallel3d.config import derived
from parallel3d.config.data_rules import (
    check_blend,
    check_bytes,
    check_slice,
    check_sources,
    check_tokenizer,
    check_tokenizer_path,
)
from parallel3d.config.optimizer_rules import OPTIMIZER_RULES
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.config.specs.policies import names_of
from parallel3d.config.warmup_rules import WARMUP_RULES
from parallel3d.errors import Problem
from parallel3d.families import FAMILIES
from parallel3d.pipeline.schedules import SCHEDULES


def broken_rules(config: Config, world_size: int | None, broken: set[str]) -> Iterator[Problem]:
    """All problems of the rules that read no broken field."""

    def usable(field: str) -> bool:
        return not any(field == bad or field.startswith(bad + ".") for bad in broken)

    for field, divisor, why in _MULTIPLES:
        if usable(field) and usable(divisor):
            yield from _check_multiple(config, field, divisor, why)
    for check, reads in _RULES:
        if all(map(usable, reads)):
            yield from check(config, world_size)


_MULTIPLES: tuple[tuple[str, str, str], ...] = (
    ("model.hidden_size", "model.num_attention_heads", "heads have one width"),
    ("model.num_attention_heads", "model.num_key_value_heads", "each key-value head serves as many query heads"),
    ("model.num_attention_heads", "parallel.tp_size", "a tensor-parallel rank holds whole heads"),
    ("model.intermediate_size", "parallel.tp_size", "tensor-parallel ranks hold equal shares"),
)
"""(field, divisor, why): the first is a multiple of the second; a null takes part in no such rule."""


def _check_multiple(config: Config, field: str, divisor: str, why: str) -> Iterator[Problem]:
    value, unit = _value(config, field), _value(config, divisor)
    if value is not None and unit is not None and value % unit:
        rule = f"must be a multiple of {divisor} = {unit}: {why}"
        fix = f"Take {value - value % unit or unit} or {value - value % unit + unit}, or change {divisor}"
        yield Problem(field=field, value=value, rule=rule, fix=fix)


def _value(config: Config, field: str) -> Any:
    node: Any = config
    for name in field.split("."):
        node = getattr(node, name)
    return node


def _check_family(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The family's own rules."""
    yield from derived.family_of(config.model).problems(config.model.model_dump())


def _check_key_value_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    heads, ranks = config.model.num_key_value_heads, config.parallel.tp_size
    if heads is not None and heads % ranks and ranks % heads:
        yield Problem(
            field="model.num_key_value_heads",
            value=heads,
            rule=f"must be a multiple or a divisor of parallel.tp_size = {ranks}: a tensor-parallel rank holds whole"
            " heads, or a copy of one",
            fix="Change either",
        )


def _check_other_families(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Settings that would be ignored because they belong to other families. Their defaults are no settings."""
    own = derived.family_of(config.model).fields
    for name in _FAMILY_FIELDS:
        value = getattr(config.model, name)
        if name not in own and value != ModelConfig.model_fields[name].default:
            owners = " or ".join(family.name for family in FAMILIES.values() if name in family.fields)
            yield Problem(
                field=f"model.{name}",
                value=value,
                rule=f"belongs to {owners}; model.architecture is {config.model.architecture}",
                fix=f"Leave it out, or use model.architecture {owners}",
            )


def _check_positions(config: Config, world_size: int | None) -> Iterator[Problem]:
    positions, length = config.model.max_position_embeddings, config.batch.sequence_length
    if positions is not None and length > positions:
        yield Problem(
            field="batch.sequence_length",
            value=length,
            rule=f"is longer than model.max_position_embeddings = {positions}",
            fix=f"Take at most {positions}, or raise model.max_position_embeddings",
        )


def _check_sequence_shards(config: Config, world_size: int | None) -> Iterator[Problem]:
    if config.parallel.sequence_parallel:
        yield from _check_multiple(
            config, "batch.sequence_length", "parallel.tp_size", "parallel.sequence_parallel cuts sequences evenly"
        )


def _check_stages(config: Config, world_size: int | None) -> Iterator[Problem]:
    parallel, layers = config.parallel, config.model.num_hidden_layers
    if parallel.pp_size * parallel.virtual_stages > layers:
        has_chunks = parallel.virtual_stages > 1
        chunks = f" for each of its parallel.virtual_stages = {parallel.virtual_stages} chunks" if has_chunks else ""
        yield Problem(
            field="parallel.pp_size",
            value=parallel.pp_size,
            rule=f"every stage needs a layer{chunks}, and model.num_hidden_layers is {layers}",
            fix="Use fewer stages or fewer chunks" if has_chunks else f"Use at most {layers} stages",
        )


def _check_virtual_stages(config: Config, world_size: int | None) -> Iterator[Problem]:
    parallel = config.parallel
    if broken := SCHEDULES[parallel.schedule].find_broken_rule(parallel.pp_size, parallel.virtual_stages):
        value = getattr(parallel, broken.field)
        yield Problem(field=f"parallel.{broken.field}", value=value, rule=broken.rule, fix=broken.fix)


def _check_layers_per_stage(config: Config, world_size: int | None) -> Iterator[Problem]:
    layers = config.parallel.layers_per_stage
    chunks = config.parallel.virtual_stages
    wanted = (config.parallel.pp_size * chunks, config.model.num_hidden_layers)
    count = "parallel.pp_size * parallel.virtual_stages" if chunks > 1 else "parallel.pp_size"
    if layers is not None and (len(layers), sum(layers)) != wanted:
        yield Problem(
            field="parallel.layers_per_stage",
            value=layers,
            rule=f"needs {wanted[0]} numbers ({count}) with the sum {wanted[1]} (model.num_hidden_layers), has"
            f" {len(layers)} with the sum {sum(layers)}",
            fix="Correct it, or leave it out to have the layers balanced",
        )


def _check_stage_replicas(config: Config, world_size: int | None) -> Iterator[Problem]:
    replicas, stages = config.parallel.stage_replicas, config.parallel.pp_size
    if replicas is None:
        return
    if len(replicas) != stages:
        yield Problem(
            field="parallel.stage_replicas",
            value=replicas,
            rule=f"needs one number for each of the parallel.pp_size = {stages} stages, has {len(replicas)}",
            fix=f"Give {stages} numbers, or use parallel.dp_size",
        )
    if config.parallel.dp_size is not None:
        yield Problem(
            field="parallel.stage_replicas",
            value=replicas,
            rule=f"excludes parallel.dp_size = {config.parallel.dp_size}, which also says how many replicas there are",
            fix="Leave one of them out",
        )


def _check_world(config: Config, world_size: int | None) -> Iterator[Problem]:
    if world_size is None:
        return
    parallel = config.parallel
    needed = sum(derived.replicas_in_world(parallel, world_size)) * parallel.tp_size
    if needed == world_size:
        return
    field = "parallel.dp_size" if parallel.stage_replicas is None else "parallel.stage_replicas"
    asked = _value(config, field)
    rule = f"makes {needed} ranks with tp_size {parallel.tp_size} and pp_size {parallel.pp_size}, not {world_size}"
    fix = f"Start {needed} ranks, or change it"
    if asked is None:
        unit = parallel.tp_size * parallel.pp_size
        rule = f"{world_size} ranks cannot be shared out over replicas of tp_size * pp_size = {unit} ranks"
        fix = f"Start a multiple of {unit} ranks, or change parallel.tp_size or parallel.pp_size"
    yield Problem(field=field, value=asked, rule=rule, fix=fix)


def _check_batch(config: Config, world_size: int | None) -> Iterator[Problem]:
    batch = config.batch
    given = [batch.global_batch_size, batch.micro_batch_size, batch.num_micro_batches]
    if given.count(None) > 1:
        yield Problem(
            field="batch",
            value=batch.model_dump(exclude_none=True),
            rule="two of global_batch_size, micro_batch_size and num_micro_batches are needed, the third follows",
            fix=f"Add {'one' if given.count(None) == 2 else 'two'} of them",
        )
        return
    total, micro, count = derived.batch_sizes(batch)
    if total != micro * count:
        yield Problem(
            field="batch.global_batch_size",
            value=total,
            rule="must be micro_batch_size * num_micro_batches, given as"
            f" {batch.micro_batch_size or '(derived)'} * {batch.num_micro_batches or '(derived)'}",
            fix=f"Leave one of the three out, or take {micro * count or micro}",
        )
        return
    most = max(derived.replicas_in_world(config.parallel, world_size))
    if count < most:
        yield Problem(
            field="batch.num_micro_batches",
            value=count,
            rule=f"is too few for {most} replicas of a stage: each needs one micro-batch at least",
            fix=f"Use smaller micro-batches, a global_batch_size of {micro * most} or more, or fewer replicas",
        )


def _check_lr_schedule_units(config: Config, world_size: int | None) -> Iterator[Problem]:
    for part, is_given in (("warmup", config.lr_schedule.warmup_steps > 0), ("decay", config.lr_schedule.decay_steps)):
        in_tokens = _value(config, f"lr_schedule.{part}_tokens")
        if is_given and in_tokens is not None:
            yield Problem(
                field=f"lr_schedule.{part}_tokens",
                value=in_tokens,
                rule=f"excludes lr_schedule.{part}_steps = {_value(config, f'lr_schedule.{part}_steps')}, which says"
                " the same in updates",
                fix="Leave one of them out",
            )


def _check_lr_warmup(config: Config, world_size: int | None) -> Iterator[Problem]:
    for unit in ("steps", "tokens"):
        warmup, end = (_value(config, f"lr_schedule.{part}_{unit}") for part in ("warmup", "decay"))
        # a short trial run may end within its warmup: that is a warning
        if config.lr_schedule.kind != "constant" and end is not None and warmup is not None and warmup > end:
            yield Problem(
                field=f"lr_schedule.warmup_{unit}",
                value=warmup,
                rule=f"is longer than the schedule, which ends at lr_schedule.decay_{unit} = {end}",
                fix=f"Take at most {end}, or raise lr_schedule.decay_{unit}",
            )


def _check_resume(config: Config, world_size: int | None) -> Iterator[Problem]:
    resume = config.run.resume
    if resume not in ("never", "auto") and not Path(expand_home(resume)).is_dir():
        yield Problem(
            field="run.resume",
            value=resume,
            rule=f"is neither never nor auto, and no folder, seen from {Path.cwd()}",
            fix="Give the path of a checkpoint, such as runs/NAME/checkpoints/latest",
        )


def _check_permanent(config: Config, world_size: int | None) -> Iterator[Problem]:
    if config.checkpoint.keep_every_weights_only and config.checkpoint.keep_every is None:
        yield Problem(
            field="checkpoint.keep_every_weights_only",
            value=True,
            rule="without checkpoint.keep_every no checkpoint is kept for ever",
            fix="Set checkpoint.keep_every to a number of steps, or leave this out",
        )


def _check_initialize_from(config: Config, world_size: int | None) -> Iterator[Problem]:
    folder = config.run.initialize_from
    if folder is not None and not Path(expand_home(folder)).is_dir():
        yield Problem(
            field="run.initialize_from",
            value=folder,
            rule=f"is no folder, seen from {Path.cwd()}",
            fix="Give a Hugging Face folder or a checkpoint; without it the weights are random",
        )


def _check_restart(config: Config, world_size: int | None) -> Iterator[Problem]:
    restart = config.restart
    if restart.max_restarts and config.checkpoint.every is None:
        yield Problem(
            field="restart.max_restarts",
            value=restart.max_restarts,
            rule="a restart begins from a checkpoint, and checkpoint.every is null",
            fix="Set checkpoint.every to the steps that a restart may lose, or leave restart.max_restarts at 0",
        )
    if restart.backoff_s > restart.max_backoff_s:
        rule = f"must be at most restart.max_backoff_s = {restart.max_backoff_s:g}"
        yield Problem(field="restart.backoff_s", value=restart.backoff_s, rule=rule, fix="Change either")


def expand_home(path: str) -> str:
    return os.path.expanduser(path)  # Path's raises on ~nobody


_FAMILY_FIELDS = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.fields))
"""The fields of `model` that not every family has."""
_BATCH_SIZES = ("batch.global_batch_size", "batch.micro_batch_size", "batch.num_micro_batches")
_RESTART = ("restart.max_restarts", "restart.backoff_s", "restart.max_backoff_s")
_STAGES = ("parallel.pp_size", "parallel.virtual_stages", "model.num_hidden_layers")
_LR_SCHEDULE = tuple(f"lr_schedule.{part}_{unit}" for part in ("warmup", "decay") for unit in ("steps", "tokens"))
_BLEND = ("data.blend.sources", "data.blend.stages", "data.blend.renormalise")
_LAYOUT = ("parallel.tp_size", "parallel.pp_size", "parallel.dp_size", "parallel.stage_replicas")


def _check_timeouts(config: Config, world_size: int | None) -> Iterator[Problem]:
    for name in ("heartbeat_timeout", "watchdog_timeout"):
        timeout = getattr(config.elastic, name)
        if timeout.min_s > timeout.max_s:
            rule = f"must be at most elastic.{name}.max_s = {timeout.max_s:g}"
            yield Problem(field=f"elastic.{name}.min_s", value=timeout.min_s, rule=rule, fix="Change either")


def _check_stochastic_rounding(config: Config, world_size: int | None) -> Iterator[Problem]:
    precision = config.precision
    fitting = names_of(lambda policy: policy.rounds_stochastically)
    if precision.stochastic_rounding and precision.policy not in fitting:
        yield Problem(
            field="precision.stochastic_rounding",
            value=precision.stochastic_rounding,
            rule=f"is for policy {' or '.join(fitting)}, and precision.policy is {precision.policy}",
            fix=f'Leave it out, or set precision.policy to "{fitting[0]}"',
        )


def _check_loss_scale(config: Config, world_size: int | None) -> Iterator[Problem]:
    scale = config.precision.loss_scale
    for name, value in scale.model_dump(exclude={"growth_interval"}).items():
        if frexp(value)[0] != 0.5:
            low = 2.0 ** floor(log2(value))
            rule, fix = "must be a power of two: scaling then changes no bit", f"Take {low:g} or {2 * low:g}"
            yield Problem(field=f"precision.loss_scale.{name}", value=value, rule=rule, fix=fix)
    for name, holds, rule in (
        ("initial", scale.initial >= scale.min, f"must be at least precision.loss_scale.min = {scale.min:g}"),
        ("growth_factor", scale.growth_factor >= 1, "must be at least 1"),
        ("backoff_factor", scale.backoff_factor <= 1, "must be at most 1"),
    ):
        if not holds:
            value = getattr(scale, name)
            yield Problem(field=f"precision.loss_scale.{name}", value=value, rule=rule, fix="Change it")


def _check_faults(config: Config, world_size: int | None) -> Iterator[Problem]:
    num_ranks = _num_ranks(config, world_size)
    for number, fault in enumerate(config.elastic.faults):
        for name, value, last in (
            ("rank", fault.rank, num_ranks - 1),
            ("step", fault.step, _last_step(config)),
        ):
            if value > last:
                rule = f"there is no such {name}: the last is {last}"
                fix = "Name one that there is, or take the fault out"
                yield Problem(field=f"elastic.faults.{number}.{name}", value=value, rule=rule, fix=fix)


def _check_evaluations(config: Config, world_size: int | None) -> Iterator[Problem]:
    run = config.run
    if run.evaluate_every is not None and run.evaluate_share is not None:
        yield Problem(
            field="run.evaluate_share",
            value=run.evaluate_share,
            rule=f"excludes run.evaluate_every = {run.evaluate_every}: evaluations come by time or by steps",
            fix="Set one of them to null",
        )


def _check_profile(config: Config, world_size: int | None) -> Iterator[Problem]:
    steps, ranks = config.debug.profile.steps, config.debug.profile.ranks
    if steps and (len(steps) != 2 or steps[0] > steps[1] or steps[1] > _last_step(config)):
        rule = "must be the first and the last step to record"
        if config.run.num_steps is not None:
            rule += f", the last at most run.num_steps = {config.run.num_steps}"
        yield Problem(field="debug.profile.steps", value=steps, rule=rule, fix="Give two steps, such as [10, 12]")
    last = _num_ranks(config, world_size) - 1
    if ranks and max(ranks) > last:
        rule = f"there is no such rank: the last is {last}"
        yield Problem(field="debug.profile.ranks", value=ranks, rule=rule, fix="Name ranks that there are")


def _check_dumps(config: Config, world_size: int | None) -> Iterator[Problem]:
    steps = config.debug.dump_tensors.steps
    if steps and max(steps) > _last_step(config):
        rule = f"there is no such step: the last is run.num_steps = {config.run.num_steps}"
        yield Problem(field="debug.dump_tensors.steps", value=steps, rule=rule, fix="Name steps that there are")


def _check_length(config: Config, world_size: int | None) -> Iterator[Problem]:
    if config.run.num_steps is None and config.run.num_tokens is None:
        rule = "says how long the run is, and neither it nor run.num_tokens is given"
        yield Problem(
            field="run.num_steps", value=None, rule=rule, fix="Give either, or both: the first reached counts"
        )


def _last_step(config: Config) -> float:
    """The last step that can be asked for; a run that ends by tokens does not name it."""
    return inf if config.run.num_steps is None else config.run.num_steps


def _num_ranks(config: Config, world_size: int | None) -> int:
    return sum(derived.stage_replicas(config)) * config.parallel.tp_size if world_size is None else world_size


_RULES: tuple[tuple[Callable[[Config, int | None], Iterator[Problem]], tuple[str, ...]], ...] = (
    (_check_family, tuple(f"model.{name}" for name in ModelConfig.model_fields)),
    (_check_key_value_heads, ("model.num_key_value_heads", "parallel.tp_size")),
    (_check_other_families, ("model.architecture", *(f"model.{name}" for name in _FAMILY_FIELDS))),
    (_check_positions, ("model.max_position_embeddings", "batch.sequence_length")),
    (_check_sequence_shards, ("batch.sequence_length", "parallel.tp_size", "parallel.sequence_parallel")),
    (_check_stages, _STAGES),
    (_check_virtual_stages, ("parallel.schedule", *_STAGES)),
    (_check_layers_per_stage, ("parallel.layers_per_stage", *_STAGES)),
    (_check_stage_replicas, _LAYOUT),
    (_check_world, _LAYOUT),
    (_check_batch, (*_BATCH_SIZES, *_LAYOUT)),
    (_check_lr_schedule_units, _LR_SCHEDULE),
    (_check_lr_warmup, ("lr_schedule.kind", *_LR_SCHEDULE)),
    (check_tokenizer, ("data.tokenizer.vocab_size", "model.vocab_size")),
    (check_bytes, ("data.tokenizer", "model.vocab_size")),
    (check_sources, ("data.sources", *_BLEND)),
    (check_blend, ("data.sources", *_BLEND)),
    (check_slice, ("data.sources", "data.blend", "data.slice.min_tokens", "warmup.batch_size.start")),
    (check_tokenizer_path, ("data.tokenizer.path",)),
    (_check_stochastic_rounding, ("precision.policy", "precision.stochastic_rounding")),
    (_check_resume, ("run.resume",)),
    (_check_permanent, ("checkpoint.keep_every_weights_only", "checkpoint.keep_every")),
    (_check_initialize_from, ("run.initialize_from",)),
    *WARMUP_RULES,
    (_check_length, ("run.num_steps", "run.num_tokens")),
    (_check_restart, (*_RESTART, "checkpoint.every")),
    (_check_loss_scale, ("precision.loss_scale",)),
    *OPTIMIZER_RULES,
    (_check_timeouts, ("elastic",)),
    (_check_faults, ("elastic.faults", "run.num_steps", *_LAYOUT)),
    (_check_evaluations, ("run.evaluate_every", "run.evaluate_share")),
    (_check_dumps, ("debug.dump_tensors.steps", "run.num_steps")),
    (_check_profile, ("debug.profile.steps", "debug.profile.ranks", "run.num_steps", *_LAYOUT)),
)
"""Each rule with the fields that it reads."""
