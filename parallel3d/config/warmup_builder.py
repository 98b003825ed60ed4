"""Builds the schedules of sequence length and batch size from the configuration, and describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from parallel3d.config.schema import Config
from parallel3d.config.sections.curriculum import from_deepspeed
from parallel3d.config.sections.warmup import SequenceLengthWarmup
from parallel3d.config.sections.warmup_rules import length_multiple
from parallel3d.errors import ConfigError, Problem
from parallel3d.size_schedule import (
    Adaptive,
    BatchShapeSchedule,
    Constant,
    Custom,
    Discrete,
    FollowsRun,
    Periodic,
    Polynomial,
    RunLength,
    SizeSchedule,
    VarianceDriven,
    compute_run_length,
)


def length_warmup(config: Config) -> SequenceLengthWarmup:
    """The warmup of the sequence length, in either of its two forms."""
    block = config.curriculum_learning
    return from_deepspeed(block) if block.enabled else config.warmup.sequence_length


def build_shape_schedule(config: Config) -> BatchShapeSchedule:
    """The shape of each step of a resolved configuration. Raises ConfigError if a custom function can't be imported."""
    warmup, size = length_warmup(config), config.warmup.batch_size
    drops = warmup.kind != "none" and not warmup.recycle
    return BatchShapeSchedule(
        length=_build_length_schedule(config, warmup),
        length_unit=warmup.unit,
        size=_build_batch_size_schedule(config),
        size_unit=size.unit,
        read_length=config.batch.sequence_length if drops else None,
    )


def check_length_function(config: Config) -> None:
    """Imports and calls the function of a custom warmup, for its first length; raises ConfigError if that fails.

    Reading a configuration runs no code of the user's, so whatever starts a run calls this first.
    """
    if length_warmup(config).kind == "custom":
        build_shape_schedule(config).length.at(1)


def run_length(config: Config) -> RunLength:
    """Length of the run of a resolved configuration, by run.num_steps or run.num_tokens, whichever is reached first.

    How the run will change a length that follows it isn't known in advance: this assumes the longest it can be.
    """
    run, shape_schedule = config.run, build_shape_schedule(config)
    if isinstance(shape_schedule.length, FollowsRun):
        assert run.num_steps is not None, "a warmup that follows the run needs it"
        shape_schedule = replace(shape_schedule, length=Constant(shape_schedule.length.last))
        whole = compute_run_length(shape_schedule, num_steps=run.num_steps, num_tokens=None)
        return replace(whole, num_tokens=min(whole.num_tokens, run.num_tokens or whole.num_tokens))
    return compute_run_length(shape_schedule, num_steps=run.num_steps, num_tokens=run.num_tokens)


def num_steps(config: Config) -> int:
    """Steps of the run of a resolved configuration; builds no schedule unless tokens have to be counted."""
    if config.run.num_tokens is None:
        assert config.run.num_steps is not None, "a run has an end"
        return config.run.num_steps
    return run_length(config).num_steps


def needs_user_code(config: Config) -> bool:
    """Whether `num_steps` would call the function of a custom warmup."""
    return config.run.num_tokens is not None and length_warmup(config).kind == "custom"


def describe_warmup(config: Config) -> Iterator[str]:
    """A line for each warmup of the batch, and one for the resulting length of the run; of a resolved configuration."""
    warmup, size, shape_schedule = length_warmup(config), config.warmup.batch_size, build_shape_schedule(config)
    if warmup.kind != "none":
        count = f", {len(values)} lengths" if (values := shape_schedule.length.values()) else ""
        tails = "no token is dropped" if warmup.recycle else "tokens beyond are dropped"
        lengths = _describe_size_schedule(shape_schedule.length, warmup.unit)
        yield f"sequence length: {warmup.kind}, {lengths}{count}; {tails}"
    if size.start is not None:
        count = f"{len(shape_schedule.size.values())} sizes, each with its own pipeline schedule"
        yield f"batch size: {_describe_size_schedule(shape_schedule.size, size.unit)}, {count}"
    if (warmup.kind == "none" and size.start is None) or isinstance(shape_schedule.length, FollowsRun):
        return
    whole = run_length(config)
    full = f"full size from step {whole.first_full_step:,}; " if whole.first_full_step is not None else ""
    dropped = f", {whole.num_dropped_tokens:,} dropped" if whole.num_dropped_tokens else ""
    yield f"{full}{whole.num_steps:,} steps in total, {whole.num_tokens:,} tokens to train on{dropped}"


# --- schedules --------------------------------------------------------------------------------------------------------


def _build_length_schedule(config: Config, warmup: SequenceLengthWarmup) -> SizeSchedule:
    full, parallel = config.batch.sequence_length, config.parallel
    multiple = length_multiple(warmup, parallel.tp_size, parallel.sequence_parallel)
    last = warmup.end or full
    match warmup.kind:
        case "none":
            return Constant(full)
        case "linear" | "root":
            assert warmup.duration is not None
            exponent = warmup.exponent if warmup.kind == "root" else 1.0
            return Polynomial(
                first=warmup.start, last=last, duration=warmup.duration, multiple=multiple, exponent=exponent
            )
        case "discrete":
            return Discrete(sizes=tuple(warmup.lengths), until=tuple(warmup.until))
        case "periodic":
            return Periodic(sizes=tuple(warmup.lengths), until=tuple(warmup.until))
        case "adaptive" | "variance":
            common: dict[str, Any] = dict(
                first=warmup.start,
                last=last,
                multiple=multiple,
                tolerance=warmup.tolerance,
                shrinks=warmup.on_fluctuation == "shrink",
                value=warmup.start,
            )
            is_adaptive = warmup.kind == "adaptive"
            return Adaptive(**common) if is_adaptive else VarianceDriven(**common, interval=warmup.interval)
        case "custom":
            name = str(warmup.function)
            return Custom(function=_load_function(name), name=name, last=full, multiple=multiple)


def _load_function(name: str) -> Callable[[int], int]:
    """The function "module:function"; ConfigError if it can't be imported."""
    module, _, attribute = name.partition(":")
    reason = f"{attribute} is not a function"
    try:
        function = getattr(import_module(module), attribute)
        if callable(function):
            return function
    except Exception as error:  # whatever the user's module raises
        reason = f"{type(error).__name__}: {error}"
    raise ConfigError(
        [
            Problem(
                field="warmup.sequence_length.function",
                value=name,
                rule=f"can't be imported ({reason})",
                fix="Name a module in a folder of PYTHONPATH, and a function in it",
            )
        ]
    )


def _build_batch_size_schedule(config: Config) -> SizeSchedule:
    full, size = config.batch.global_batch_size, config.warmup.batch_size
    assert full is not None, "needs a resolved configuration"
    if size.start is None:
        return Constant(full)
    assert size.duration is not None and size.increment is not None
    return Polynomial(first=size.start, last=full, duration=size.duration, multiple=size.increment)


def _describe_size_schedule(size_schedule: SizeSchedule, unit: str) -> str:
    match size_schedule:
        case Polynomial():
            power = "" if size_schedule.exponent == 1 else f", exponent {size_schedule.exponent:.4g}"
            ends = f"from {size_schedule.first:,} to {size_schedule.last:,}"
            return f"{ends} over {size_schedule.duration:,} {unit}{power}"
        case Discrete() | Periodic():
            ends = ", ".join(
                f"{size:,} to {unit[:-1]} {end:,}" for size, end in zip(size_schedule.sizes, size_schedule.until)
            )
            if isinstance(size_schedule, Periodic):
                return f"{ends}, in a cycle"
            return f"{ends}, then {size_schedule.sizes[-1]:,}"
        case Adaptive():
            limit = f"while the perplexity is at most {size_schedule.tolerance:g} x the best"
            growth = f"{size_schedule.multiple} longer after each evaluation"
            return f"from {size_schedule.first:,} to {size_schedule.last:,}, {growth} {limit}"
        case VarianceDriven():
            limit = f"in which the largest sqrt(v) is at most {size_schedule.tolerance:g} x its recent mean"
            growth = f"{size_schedule.multiple} longer after {size_schedule.interval} steps in a row"
            return f"from {size_schedule.first:,} to {size_schedule.last:,}, {growth} {limit}"
        case Custom():
            return size_schedule.name
    return str(size_schedule.at(1))
