"""From the warmup sections to the pacing of a run; and what a person is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from math import lcm

from parallel3d.config.schema import Config
from parallel3d.config.warmup import CurriculumLearning, SequenceLengthWarmup
from parallel3d.pacing import Adaptive, Custom, Cycle, Extent, Growth, Pace, Pacing, Stages, Stays, extent_of

DEEPSPEED_KINDS = {"fixed_linear": "linear", "fixed_root": "root", "fixed_discrete": "discrete"}
"""schedule_type and our kind."""

FIELDS = {
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
    given = {name: value for name, value in fields.items() if value and name in ("multiple", *FIELDS[kind])}
    return SequenceLengthWarmup.model_validate({"kind": kind, **given})


def length_unit(config: Config) -> int:
    """What all lengths are multiples of."""
    parallel = config.parallel
    return lcm(length_warmup(config).multiple, parallel.tp_size if parallel.sequence_parallel else 1)


def pacing_of(config: Config) -> Pacing:
    """The shape of each step; of a resolved configuration."""
    warmup, size = length_warmup(config), config.warmup.batch_size
    drops = warmup.kind != "none" and not warmup.recycle
    return Pacing(
        length=_length_pace(config, warmup),
        length_unit=warmup.unit,
        size=_size_pace(config),
        size_unit=size.unit,
        read_length=config.batch.sequence_length if drops else None,
    )


def extent(config: Config) -> Extent:
    """How long the run is, by run.num_steps or run.num_tokens, the first that is reached; of a resolved configuration.

    What evaluations will make of an adaptive length nobody knows: then it is the most that it can be.
    """
    run, pacing = config.run, pacing_of(config)
    if isinstance(pacing.length, Adaptive):
        assert run.num_steps is not None, "an adaptive warmup needs it"
        pacing = replace(pacing, length=Stays(pacing.length.last))
        whole = extent_of(pacing, num_steps=run.num_steps, num_tokens=None)
        return replace(whole, num_tokens=min(whole.num_tokens, run.num_tokens or whole.num_tokens))
    return extent_of(pacing, num_steps=run.num_steps, num_tokens=run.num_tokens)


def num_steps(config: Config) -> int:
    """Iterations of the run, of a resolved configuration; at once, where no tokens need be counted."""
    if config.run.num_tokens is None:
        assert config.run.num_steps is not None, "a run has an end"
        return config.run.num_steps
    return extent(config).num_steps


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
    warmup, size, pacing = length_warmup(config), config.warmup.batch_size, pacing_of(config)
    if warmup.kind != "none":
        count = f", {len(values)} different ones" if (values := pacing.length.values()) else ""
        tails = "lanes move on by what is trained on" if warmup.recycle else "the tails are dropped"
        yield f"sequence length: {warmup.kind}, {_describe_pace(pacing.length, warmup.unit)}{count}; {tails}"
    if size.start is not None:
        count = f"{len(pacing.size.values())} different ones, a schedule for each"
        yield f"sequences a step: {_describe_pace(pacing.size, size.unit)}, {count}"
    if (warmup.kind == "none" and size.start is None) or isinstance(pacing.length, Adaptive):
        return
    whole = extent(config)
    full = f"full size from step {whole.full_from:,} on; " if whole.full_from is not None else ""
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


def _length_pace(config: Config, warmup: SequenceLengthWarmup) -> Pace:
    full, multiple = config.batch.sequence_length, length_unit(config)
    last = warmup.end or full
    match warmup.kind:
        case "none":
            return Stays(full)
        case "linear" | "root":
            assert warmup.duration is not None
            exponent = warmup.exponent if warmup.kind == "root" else 1.0
            return Growth(first=warmup.start, last=last, over=warmup.duration, multiple=multiple, exponent=exponent)
        case "discrete":
            return Stages(sizes=tuple(warmup.lengths), until=tuple(warmup.until))
        case "periodic":
            return Cycle(sizes=tuple(warmup.lengths), until=tuple(warmup.until))
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


def _size_pace(config: Config) -> Pace:
    full, size = config.batch.global_batch_size, config.warmup.batch_size
    assert full is not None, "needs a resolved configuration"
    if size.start is None:
        return Stays(full)
    assert size.duration is not None and size.increment is not None
    return Growth(first=size.start, last=full, over=size.duration, multiple=size.increment)


def _describe_pace(pace: Pace, unit: str) -> str:
    match pace:
        case Growth():
            power = "" if pace.exponent == 1 else f" by the power {pace.exponent:.4g}"
            return f"from {pace.first:,} to {pace.last:,} over {pace.over:,} {unit}{power}"
        case Stages() | Cycle():
            ends = [f"{size:,} to {unit[:-1]} {end:,}" for size, end in zip(pace.sizes, pace.until)]
            last = f"again after {pace.until[-1]:,}" if isinstance(pace, Cycle) else f"then {pace.sizes[-1]:,}"
            return ", ".join([*ends, last])
        case Adaptive():
            limit = f"while the perplexity is at most {pace.tolerance:g} x the best"
            return f"from {pace.first:,} to {pace.last:,}, {pace.multiple} longer after each evaluation {limit}"
        case Custom():
            return pace.name
    return str(pace.at(1))
