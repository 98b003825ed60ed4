"""From the warmup sections to the pacing of a run; and what a person is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from math import lcm

from parallel3d.config.schema import Config
from parallel3d.config.sections.warmup import CurriculumLearning, SequenceLengthWarmup
from parallel3d.size_schedule import (
    Adaptive,
    BatchShapeSchedule,
    Constant,
    Custom,
    Discrete,
    Periodic,
    Polynomial,
    RunLength,
    SizeSchedule,
    compute_run_length,
)

DEEPSPEED_KINDS = {"fixed_linear": "linear", "fixed_root": "root", "fixed_discrete": "discrete"}
"""schedule_type and our kind."""

FIELDS_BY_KIND = {
    "linear": ("start", "end", "duration", "unit"),
    "root": ("start", "end", "duration", "unit", "exponent"),
    "discrete": ("lengths", "until", "unit"),
    "periodic": ("lengths", "until", "unit"),
    "adaptive": ("start", "end", "tolerance", "on_fluctuation"),
    "custom": ("function", "unit"),
    "none": (),
}
"""What each kind reads, besides multiple and recycle."""


def length_warmup(config: Config) -> SequenceLengthWarmup:
    """The warmup of the sequence length, in whichever of its two forms it is given."""
    block = config.curriculum_learning
    return from_deepspeed(block) if block.enabled else config.warmup.sequence_length


def from_deepspeed(block: CurriculumLearning) -> SequenceLengthWarmup:
    """What DeepSpeed's block says, in our words; of a block that breaks no rule."""
    schedule, kind = block.schedule_config, DEEPSPEED_KINDS[str(block.schedule_type)]
    fields = dict(
        start=block.min_difficulty,
        end=block.max_difficulty,
        duration=schedule.total_curriculum_step,
        exponent=1.0 / schedule.root_degree if schedule.root_degree else None,
        lengths=schedule.difficulty,
        until=schedule.max_step,
        multiple=schedule.difficulty_step,
    )
    given = {name: value for name, value in fields.items() if value and name in ("multiple", *FIELDS_BY_KIND[kind])}
    return SequenceLengthWarmup.model_validate({"kind": kind, **given})


def length_multiple(config: Config) -> int:
    """What all lengths are multiples of."""
    parallel = config.parallel
    return lcm(length_warmup(config).multiple, parallel.tp_size if parallel.sequence_parallel else 1)


def build_shape_schedule(config: Config) -> BatchShapeSchedule:
    """The shape of each step; of a resolved configuration."""
    warmup, size = length_warmup(config), config.warmup.batch_size
    drops = warmup.kind != "none" and not warmup.recycle
    return BatchShapeSchedule(
        length=_build_length_schedule(config, warmup),
        length_unit=warmup.unit,
        size=_build_batch_size_schedule(config),
        size_unit=size.unit,
        read_length=config.batch.sequence_length if drops else None,
    )


def run_length(config: Config) -> RunLength:
    """How long the run is, by run.num_steps or run.num_tokens, the first that is reached; of a resolved configuration.

    What evaluations will make of an adaptive length nobody knows: then it is the most that it can be.
    """
    run, shape_schedule = config.run, build_shape_schedule(config)
    if isinstance(shape_schedule.length, Adaptive):
        assert run.num_steps is not None, "an adaptive warmup needs it"
        shape_schedule = replace(shape_schedule, length=Constant(shape_schedule.length.last))
        whole = compute_run_length(shape_schedule, num_steps=run.num_steps, num_tokens=None)
        return replace(whole, num_tokens=min(whole.num_tokens, run.num_tokens or whole.num_tokens))
    return compute_run_length(shape_schedule, num_steps=run.num_steps, num_tokens=run.num_tokens)


def num_steps(config: Config) -> int:
    """Iterations of the run, of a resolved configuration; at once, where no tokens need be counted."""
    if config.run.num_tokens is None:
        assert config.run.num_steps is not None, "a run has an end"
        return config.run.num_steps
    return run_length(config).num_steps


def load_function(name: str) -> Callable[[int], int]:
    """The function "module:function"; ValueError where there is none, or its module can't be imported."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError("it is not of the form module:function")
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"{attribute} is not a function")
    return function


def describe_warmup(config: Config) -> Iterator[str]:
    """A line for each warmup of the batch, and one for the length of the run that they lead to; of a resolved
    configuration."""
    warmup, size, shape_schedule = length_warmup(config), config.warmup.batch_size, build_shape_schedule(config)
    if warmup.kind != "none":
        count = f", {len(values)} different ones" if (values := shape_schedule.length.values()) else ""
        tails = "lanes move on by what is trained on" if warmup.recycle else "the tails are dropped"
        lengths = _describe_size_schedule(shape_schedule.length, warmup.unit)
        yield f"sequence length: {warmup.kind}, {lengths}{count}; {tails}"
    if size.start is not None:
        count = f"{len(shape_schedule.size.values())} different ones, a schedule for each"
        yield f"sequences a step: {_describe_size_schedule(shape_schedule.size, size.unit)}, {count}"
    if (warmup.kind == "none" and size.start is None) or isinstance(shape_schedule.length, Adaptive):
        return
    whole = run_length(config)
    full = f"full size from step {whole.first_full_step:,} on; " if whole.first_full_step is not None else ""
    dropped = f", {whole.num_dropped_tokens:,} dropped" if whole.num_dropped_tokens else ""
    yield f"{full}{whole.num_steps:,} steps in all, {whole.num_tokens:,} tokens to train on{dropped}"


def warmup_warnings(config: Config) -> Iterator[tuple[bool, str]]:
    """What is allowed but hardly meant, with whether it is there; of a resolved configuration."""
    warmup, size, full = config.warmup.sequence_length, config.warmup.batch_size, config.batch.sequence_length
    lengths = [*warmup.lengths, warmup.end or full] if warmup.kind in ("discrete", "periodic") else [warmup.end or full]
    yield (
        warmup.kind != "none" and size.start is not None,
        "warmup.sequence_length and warmup.batch_size both make a step's tokens fewer: each was meant to be alone",
    )
    yield (
        warmup.kind != "none" and warmup.multiple % 8 != 0,
        f"sequence lengths that are no multiples of 8 are slow on GPUs (warmup.sequence_length.multiple"
        f" {warmup.multiple})",
    )
    yield (
        warmup.kind not in ("none", "custom") and max(lengths) < full,
        f"no step is as long as batch.sequence_length = {full}: the warmup ends at {max(lengths)}",
    )
    for name, duration, unit in (
        ("sequence_length", warmup.duration if warmup.kind in ("linear", "root") else None, warmup.unit),
        ("batch_size", size.duration if size.start is not None else None, size.unit),
    ):
        limit = config.run.num_steps if unit == "steps" else config.run.num_tokens
        yield (
            duration is not None and limit is not None and duration > limit,
            f"the run ends at {limit} {unit}, before warmup.{name}.duration = {duration}",
        )


def _build_length_schedule(config: Config, warmup: SequenceLengthWarmup) -> SizeSchedule:
    full, multiple = config.batch.sequence_length, length_multiple(config)
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
        case "adaptive":
            return Adaptive(
                first=warmup.start,
                last=last,
                multiple=multiple,
                tolerance=warmup.tolerance,
                shrinks=warmup.on_fluctuation == "shrink",
                value=warmup.start,
            )
        case "custom":
            name = str(warmup.function)
            return Custom(function=load_function(name), name=name, last=full, multiple=multiple)


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
            power = "" if size_schedule.exponent == 1 else f" by the power {size_schedule.exponent:.4g}"
            return (
                f"from {size_schedule.first:,} to {size_schedule.last:,} over {size_schedule.duration:,} {unit}{power}"
            )
        case Discrete() | Periodic():
            ends = [f"{size:,} to {unit[:-1]} {end:,}" for size, end in zip(size_schedule.sizes, size_schedule.until)]
            last = (
                f"again after {size_schedule.until[-1]:,}"
                if isinstance(size_schedule, Periodic)
                else f"then {size_schedule.sizes[-1]:,}"
            )
            return ", ".join([*ends, last])
        case Adaptive():
            limit = f"while the perplexity is at most {size_schedule.tolerance:g} x the best"
            growth = f"{size_schedule.multiple} longer after each evaluation"
            return f"from {size_schedule.first:,} to {size_schedule.last:,}, {growth} {limit}"
        case Custom():
            return size_schedule.name
    return str(size_schedule.at(1))
