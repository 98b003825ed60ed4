"""Rules for the warmups of the batch: what DeepSpeed lets through and trains on badly is refused here.

DeepSpeed's curriculum yields lengths of 0 for a min_difficulty below difficulty_step, and an unaligned last length
after it has stayed below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from parallel3d.config import derived
from parallel3d.config.schema import Config
from parallel3d.config.sections.warmup import (
    BatchSizeWarmup,
    CurriculumLearning,
    CurriculumSchedule,
    SequenceLengthWarmup,
)
from parallel3d.config.warmup_builder import FIELDS_BY_KIND, length_multiple, length_warmup, load_function
from parallel3d.errors import Problem
from parallel3d.size_schedule import Custom

WARMUP_SECTION = "warmup.sequence_length"
DEEPSPEED_SECTION = "curriculum_learning"
REQUIRED_FIELDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}
"""What DeepSpeed's kinds of schedule_config must have."""
DEEPSPEED_FIELDS = {
    "start": "min_difficulty",
    "end": "max_difficulty",
    "duration": "schedule_config.total_curriculum_step",
    "multiple": "schedule_config.difficulty_step",
    "lengths": "schedule_config.difficulty",
    "until": "schedule_config.max_step",
}
"""Our fields and DeepSpeed's."""


def check_sequence_length_warmup(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The warmup of the sequence length, in either form."""
    if config.curriculum_learning.enabled:
        problems = list(_check_deepspeed_section(config))
        yield from problems
        if problems:
            return
    warmup = length_warmup(config)
    yield from _check_fields(config, warmup)
    if warmup.recycle and config.data.slice is not None:
        rule = "needs text of which any number of tokens can be read; data.slice has whole sequences"
        yield Problem(field=f"{WARMUP_SECTION}.recycle", value=True, rule=rule, fix="Leave one of them out")
    if warmup.kind != "none":
        yield from _check_alignment(config, warmup)
        yield from _KINDS[warmup.kind](config, warmup)


def check_batch_size_warmup(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The warmup of the batch size."""
    size, batch = config.warmup.batch_size, config.batch
    given = [batch.global_batch_size, batch.micro_batch_size, batch.num_micro_batches]
    if size.start is None or given.count(None) > 1:
        return
    full, micro, _ = derived.batch_sizes(batch)
    step = size.increment or micro
    if size.duration is None:
        yield _missing_field("warmup.batch_size.duration", "the steps or tokens until batch.global_batch_size")
    if step % micro:
        rule = f"must be a multiple of batch.micro_batch_size = {micro}: a step has whole micro-batches"
        yield Problem(field="warmup.batch_size.increment", value=step, rule=rule, fix=_nearest_multiples(step, micro))
        return
    for field, value in (("warmup.batch_size.start", size.start), ("batch.global_batch_size", full)):
        if value % step:
            rule = f"must be a multiple of the increment {step} (warmup.batch_size.increment, batch.micro_batch_size)"
            yield Problem(
                field=field, value=value, rule=rule, fix=f"{_nearest_multiples(value, step)}, or change the increment"
            )
    least = micro * max(derived.replicas_in_world(config.parallel, world_size))
    if not least <= size.start <= full:
        yield Problem(
            field="warmup.batch_size.start",
            value=size.start,
            rule=f"must be from {least}, a micro-batch for each replica, to batch.global_batch_size = {full}",
            fix="Change it, batch.micro_batch_size or the number of replicas",
        )


# --- the parts --------------------------------------------------------------------------------------------------------


def _check_deepspeed_section(config: Config) -> Iterator[Problem]:
    """Whether DeepSpeed's block can be read."""
    block = config.curriculum_learning
    if config.warmup.sequence_length.kind != "none":
        rule = f"says what {WARMUP_SECTION} says, which is given too"
        yield Problem(field=DEEPSPEED_SECTION, value="enabled", rule=rule, fix="Leave one of them out")
    if block.schedule_type == "custom":
        rule = "DeepSpeed gets the function from a program, which is not here"
        fix = f'Give {WARMUP_SECTION} as {{"kind": "custom", "function": "module:function"}} instead'
        yield Problem(field=f"{DEEPSPEED_SECTION}.schedule_type", value="custom", rule=rule, fix=fix)
        return
    for name in ("min_difficulty", "max_difficulty", "schedule_type"):
        if getattr(block, name) is None:
            yield _missing_field(f"{DEEPSPEED_SECTION}.{name}", "DeepSpeed wants it too")
    for name in REQUIRED_FIELDS.get(str(block.schedule_type), ()):
        if not getattr(block.schedule_config, name):
            yield _missing_field(f"{DEEPSPEED_SECTION}.schedule_config.{name}", f"{block.schedule_type} needs it")


def _check_fields(config: Config, warmup: SequenceLengthWarmup) -> Iterator[Problem]:
    """Settings that would be ignored."""
    for name, field in SequenceLengthWarmup.model_fields.items():
        value = getattr(warmup, name)
        is_read = name in ("kind", "multiple", "recycle", *FIELDS_BY_KIND[warmup.kind])
        if not is_read and value != field.default:
            others = ", ".join(kind for kind, names in FIELDS_BY_KIND.items() if name in names)
            rule = f"is for the kinds {others}, and {WARMUP_SECTION}.kind is {warmup.kind}"
            yield Problem(
                field=_field_name(config, name), value=value, rule=rule, fix="Leave it out, or change the kind"
            )


def _check_alignment(config: Config, warmup: SequenceLengthWarmup) -> Iterator[Problem]:
    """Every length is aligned and no longer than the model's."""
    unit, full = length_multiple(config), config.batch.sequence_length
    shards = f" and parallel.tp_size = {config.parallel.tp_size}" if unit != warmup.multiple else ""
    named: list[tuple[str, int]] = []
    if "start" in FIELDS_BY_KIND[warmup.kind]:
        last = ("batch.sequence_length", full) if warmup.end is None else (_field_name(config, "end"), warmup.end)
        named = [(_field_name(config, "start"), warmup.start), last]
        if warmup.start > last[1]:
            rule = f"is longer than {last[0]} = {last[1]}, with which the warmup ends"
            yield Problem(field=named[0][0], value=warmup.start, rule=rule, fix="Take a shorter one")
    if "lengths" in FIELDS_BY_KIND[warmup.kind]:
        named = [(f"{_field_name(config, 'lengths')}.{number}", value) for number, value in enumerate(warmup.lengths)]
    if warmup.kind == "custom":
        named = [("batch.sequence_length", full)]
    for field, value in named:
        if value % unit:
            rule = f"must be a multiple of {unit} ({_field_name(config, 'multiple')} = {warmup.multiple}{shards})"
            yield Problem(field=field, value=value, rule=rule, fix=_nearest_multiples(value, unit))
        if value > full:
            rule = f"is longer than batch.sequence_length = {full}"
            yield Problem(field=field, value=value, rule=rule, fix=f"Take at most {full}, or raise it")


def _check_duration(config: Config, warmup: SequenceLengthWarmup) -> Iterator[Problem]:
    if warmup.duration is None:
        yield _missing_field(_field_name(config, "duration"), "the steps or tokens until the end length is reached")


def _check_discrete(config: Config, warmup: SequenceLengthWarmup) -> Iterator[Problem]:
    wanted = len(warmup.lengths) - (warmup.kind == "discrete")
    if not warmup.lengths or len(warmup.until) != wanted or not warmup.until:
        all_but = "all but the last" if warmup.kind == "discrete" else "each"
        rule = f"needs the last {warmup.unit[:-1]} of {all_but} of the lengths {warmup.lengths}, two lengths at least"
        fix = f"Give {max(wanted, 1)} number{'s' * (wanted > 1)}"
        yield Problem(field=_field_name(config, "until"), value=warmup.until, rule=rule, fix=fix)
    elif any(later <= earlier for earlier, later in pairwise(warmup.until)):
        rule = "must increase: they count from the start" + (" of a period" if warmup.kind == "periodic" else "")
        yield Problem(field=_field_name(config, "until"), value=warmup.until, rule=rule, fix="Give them in order")


def _check_adaptive(config: Config, warmup: SequenceLengthWarmup) -> Iterator[Problem]:
    for field, value, fix in (
        ("run.evaluate_every", config.run.evaluate_every, "Give the steps between two evaluations"),
        ("data.validation_fraction", config.data.validation_fraction, "Keep some text for evaluation"),
        (
            "run.num_steps",
            config.run.num_steps,
            "Give a limit: how many steps run.num_tokens takes is not known before",
        ),
    ):
        if not value:
            rule = f"{WARMUP_SECTION}.kind adaptive goes by evaluations, and needs it"
            yield Problem(field=field, value=value, rule=rule, fix=fix)
    if warmup.tolerance < 1:
        rule = "must be at least 1: an evaluation as good as the best one is no fluctuation"
        yield Problem(
            field=f"{WARMUP_SECTION}.tolerance", value=warmup.tolerance, rule=rule, fix="The paper's mark is 1.3"
        )


def _check_custom(config: Config, warmup: SequenceLengthWarmup) -> Iterator[Problem]:
    field, fix = f"{WARMUP_SECTION}.function", 'Give "module:function", the module in a folder of PYTHONPATH'
    if warmup.function is None:
        yield _missing_field(field, 'the length\'s function, "module:function"')
        return
    full, unit = config.batch.sequence_length, length_multiple(config)
    try:
        Custom(function=load_function(warmup.function), name="it", last=full, multiple=unit).at(1)
    except Exception as error:  # whatever the user's function raises
        yield Problem(field=field, value=warmup.function, rule=str(error), fix=fix)


_KINDS: dict[str, Callable[[Config, SequenceLengthWarmup], Iterator[Problem]]] = {
    "linear": _check_duration,
    "root": _check_duration,
    "discrete": _check_discrete,
    "periodic": _check_discrete,
    "adaptive": _check_adaptive,
    "custom": _check_custom,
}


def _field_name(config: Config, field: str) -> str:
    """Where the user has written what we call `field`."""
    if config.curriculum_learning.enabled:
        return f"{DEEPSPEED_SECTION}.{DEEPSPEED_FIELDS.get(field, field)}"
    return f"{WARMUP_SECTION}.{field}"


def _missing_field(field: str, meaning: str) -> Problem:
    return Problem(field=field, value=None, rule="is required here", fix=f"Add it: {meaning}")


def _nearest_multiples(value: int, unit: int) -> str:
    return f"Take {value - value % unit or unit} or {value - value % unit + unit}"


_LAYOUT = ("parallel.tp_size", "parallel.pp_size", "parallel.dp_size", "parallel.stage_replicas")
WARMUP_RULES = (
    (
        check_sequence_length_warmup,
        (
            *(f"warmup.sequence_length.{name}" for name in SequenceLengthWarmup.model_fields),
            *(f"curriculum_learning.{name}" for name in CurriculumLearning.model_fields),
            *(f"curriculum_learning.schedule_config.{name}" for name in CurriculumSchedule.model_fields),
            "batch.sequence_length",
            "parallel.tp_size",
            "parallel.sequence_parallel",
            "run.evaluate_every",
            "run.num_steps",
            "data.validation_fraction",
            "data.slice",
        ),
    ),
    (
        check_batch_size_warmup,
        (
            *(f"warmup.batch_size.{name}" for name in BatchSizeWarmup.model_fields),
            "batch.global_batch_size",
            "batch.micro_batch_size",
            "batch.num_micro_batches",
            *_LAYOUT,
        ),
    ),
)
"""Each rule with the fields that it reads."""
