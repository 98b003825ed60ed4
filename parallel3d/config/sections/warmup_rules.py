"""Rules of the configuration's section `warmup`, in our form or DeepSpeed's.

They refuse what DeepSpeed accepts but trains badly on: a min_difficulty or max_difficulty that isn't a multiple of
difficulty_step (it stays below an unaligned max_difficulty until the curriculum ends, then takes the unaligned length).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import lcm

from parallel3d.config.rule import WORLD_SIZE, excludes, must_be_multiple, nearest_multiples, required, rule, too_large
from parallel3d.config.sections.batch import BATCH_SIZES, BatchConfig, batch_sizes, has_batch_sizes
from parallel3d.config.sections.curriculum import CurriculumLearning, from_deepspeed, is_complete
from parallel3d.config.sections.data import SliceConfig
from parallel3d.config.sections.parallel import LAYOUT, ParallelConfig, most_replicas
from parallel3d.config.sections.run import RunConfig
from parallel3d.config.sections.warmup import FIELDS_BY_KIND, BatchSizeWarmup, SequenceLengthWarmup
from parallel3d.errors import Problem
from parallel3d.optim.update_rules import has_exp_avg_sq

SECTION = "warmup.sequence_length"
DEEPSPEED_SECTION = "curriculum_learning"
DEEPSPEED_FIELDS = {
    "start": "min_difficulty",
    "end": "max_difficulty",
    "duration": "schedule_config.total_curriculum_step",
    "multiple": "schedule_config.difficulty_step",
    "lengths": "schedule_config.difficulty",
    "until": "schedule_config.max_step",
}
"""Our fields and DeepSpeed's."""


def length_multiple(warmup: SequenceLengthWarmup, tp_size: int, sequence_parallel: bool) -> int:
    """The number of which all lengths are multiples."""
    return lcm(warmup.multiple, tp_size if sequence_parallel else 1)


def _effective(warmup: SequenceLengthWarmup, block: CurriculumLearning) -> SequenceLengthWarmup:
    """The warmup in whichever form it is given; none if the block is incomplete, which a rule of its own reports."""
    if not block.enabled:
        return warmup
    return from_deepspeed(block) if is_complete(block) else SequenceLengthWarmup()


def _name(block: CurriculumLearning, field: str) -> str:
    """Where the user has written what we call `field`."""
    if block.enabled:
        return f"{DEEPSPEED_SECTION}.{DEEPSPEED_FIELDS.get(field, field)}"
    return f"{SECTION}.{field}"


# --- the length of sequences ------------------------------------------------------------------------------------------


@rule(SECTION, DEEPSPEED_SECTION)
def check_fields_of_kind(warmup: SequenceLengthWarmup, block: CurriculumLearning) -> Iterator[Problem]:
    """No field is set that the kind would ignore. Kind none switches a warmup off, whatever else is set."""
    warmup = _effective(warmup, block)
    if warmup.kind == "none":
        return
    for name, field in SequenceLengthWarmup.model_fields.items():
        value = getattr(warmup, name)
        is_read = name in ("kind", "multiple", "recycle", *FIELDS_BY_KIND[warmup.kind])
        if not is_read and value != field.default:
            kinds = ", ".join(kind for kind, names in FIELDS_BY_KIND.items() if name in names)
            rule_text = f"only applies to the kinds {kinds}, and {SECTION}.kind is {warmup.kind}"
            yield Problem(field=_name(block, name), value=value, rule=rule_text, fix="Remove it, or change the kind")


@rule(SECTION, DEEPSPEED_SECTION)
def check_duration(warmup: SequenceLengthWarmup, block: CurriculumLearning) -> Iterator[Problem]:
    """linear and root have a duration."""
    warmup = _effective(warmup, block)
    if "duration" in FIELDS_BY_KIND[warmup.kind] and warmup.duration is None:
        yield required(_name(block, "duration"), "the steps or tokens until the end length is reached")


@rule(SECTION, DEEPSPEED_SECTION)
def check_until(warmup: SequenceLengthWarmup, block: CurriculumLearning) -> Iterator[Problem]:
    """Every length of discrete and periodic has an end, and they increase."""
    warmup = _effective(warmup, block)
    if "until" not in FIELDS_BY_KIND[warmup.kind]:
        return
    is_periodic = warmup.kind == "periodic"
    wanted = len(warmup.lengths) if is_periodic else len(warmup.lengths) - 1
    if not warmup.until or len(warmup.until) != wanted:
        which = "each" if is_periodic else "all but the last"
        rule_text = f"needs the last {warmup.unit[:-1]} of {which} of the lengths {warmup.lengths}, of at least two"
        fix = f"Give {wanted} numbers" if wanted > 1 else "Give 1 number"
        yield Problem(field=_name(block, "until"), value=warmup.until, rule=rule_text, fix=fix)
    elif any(later <= earlier for earlier, later in pairwise(warmup.until)):
        since = "the start of a period" if is_periodic else "the start of the run"
        rule_text = f"must increase: it counts from {since}"
        yield Problem(field=_name(block, "until"), value=warmup.until, rule=rule_text, fix="Correct the order")


@rule(SECTION, DEEPSPEED_SECTION, "batch.sequence_length", "parallel: tp_size sequence_parallel")
def check_alignment(
    warmup: SequenceLengthWarmup, block: CurriculumLearning, full: int, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Every length is a multiple of the unit, and at most the full length."""
    warmup = _effective(warmup, block)
    unit = length_multiple(warmup, parallel.tp_size, parallel.sequence_parallel)
    origin = f"{_name(block, 'multiple')} = {warmup.multiple}"
    if unit != warmup.multiple:
        origin += f" and parallel.tp_size = {parallel.tp_size}"
    for field, value in _named_lengths(warmup, block, full):
        if value % unit:
            fix = nearest_multiples(value, unit)
            yield Problem(field=field, value=value, rule=f"must be a multiple of {unit} ({origin})", fix=fix)
        if value > full:
            yield too_large(field, value, "batch.sequence_length", full)


def _named_lengths(warmup: SequenceLengthWarmup, block: CurriculumLearning, full: int) -> list[tuple[str, int]]:
    """(field, value) of all lengths that the user has written, and that the kind reads."""
    if "start" in FIELDS_BY_KIND[warmup.kind]:
        end = ("batch.sequence_length", full) if warmup.end is None else (_name(block, "end"), warmup.end)
        return [(_name(block, "start"), warmup.start), end]
    if "lengths" in FIELDS_BY_KIND[warmup.kind]:
        return [(f"{_name(block, 'lengths')}.{number}", value) for number, value in enumerate(warmup.lengths)]
    return [("batch.sequence_length", full)] if warmup.kind == "custom" else []


@rule(SECTION, DEEPSPEED_SECTION, "batch.sequence_length")
def check_direction(warmup: SequenceLengthWarmup, block: CurriculumLearning, full: int) -> Iterator[Problem]:
    """Lengths grow."""
    warmup = _effective(warmup, block)
    if "start" in FIELDS_BY_KIND[warmup.kind] and warmup.start > (warmup.end or full):
        end = "batch.sequence_length" if warmup.end is None else _name(block, "end")
        why = "the warmup ends with it"
        yield too_large(_name(block, "start"), warmup.start, end, warmup.end or full, why)


@rule(SECTION, "run: evaluate_every num_steps", "data.validation_fraction")
def check_adaptive(warmup: SequenceLengthWarmup, run: RunConfig, validation_fraction: float) -> Iterator[Problem]:
    """adaptive has evaluations to follow, and a last step."""
    if warmup.kind != "adaptive":
        return
    for field, value, fix in (
        ("run.evaluate_every", run.evaluate_every, "Give the steps between two evaluations"),
        ("data.validation_fraction", validation_fraction, "Hold out some text for evaluation"),
        ("run.num_steps", run.num_steps, "Set a limit: the steps that run.num_tokens takes aren't known in advance"),
    ):
        if not value:
            rule_text = f"is required by {SECTION}.kind adaptive, which follows evaluations"
            yield Problem(field=field, value=value, rule=rule_text, fix=fix)
    if warmup.tolerance < 1:
        rule_text = "must be at least 1: an evaluation as good as the best one is not a fluctuation"
        yield Problem(field=f"{SECTION}.tolerance", value=warmup.tolerance, rule=rule_text, fix="The paper uses 1.3")


@rule(SECTION, "run.num_steps", "monitor.norms_every", "optimizer.kind")
def check_variance(
    warmup: SequenceLengthWarmup, num_steps: int | None, norms_every: int | None, optimizer: str
) -> Iterator[Problem]:
    """variance has values to follow, and a last step."""
    if warmup.kind != "variance":
        return
    why = f"is required by {SECTION}.kind variance"
    if num_steps is None:
        fix = "Set a limit: the steps that run.num_tokens takes aren't known in advance"
        yield Problem(field="run.num_steps", value=None, rule=why, fix=fix)
    if norms_every is None:
        text = f"{why}, which follows the largest sqrt(v)"
        yield Problem(field="monitor.norms_every", value=None, rule=text, fix="Use 1, to measure it in every step")
    if not has_exp_avg_sq(optimizer):
        text = f"keeps no second moment, which {SECTION}.kind variance follows"
        yield Problem(field="optimizer.kind", value=optimizer, rule=text, fix="Use adamw, or another warmup")
    if warmup.tolerance < 1:
        text = "must be at least 1: a value as large as those before is not a jump"
        yield Problem(field=f"{SECTION}.tolerance", value=warmup.tolerance, rule=text, fix="Use 1.3")


@rule(SECTION)
def check_custom(warmup: SequenceLengthWarmup) -> Iterator[Problem]:
    """custom names a function. It is imported where a run starts, not where its configuration is read."""
    if warmup.kind != "custom":
        return
    field = f"{SECTION}.function"
    if warmup.function is None:
        yield required(field, 'the function that returns the length, "module:function"')
    elif not all(warmup.function.partition(":")):
        fix = "Name a module in a folder of PYTHONPATH, and a function in it"
        yield Problem(field=field, value=warmup.function, rule='must be of the form "module:function"', fix=fix)


@rule("warmup.sequence_length: kind recycle", "data.slice")
def check_recycle(warmup: SequenceLengthWarmup, part: SliceConfig | None) -> Iterator[Problem]:
    """A slice is read in whole sequences."""
    if warmup.kind != "none" and warmup.recycle and part is not None:
        yield excludes(f"{SECTION}.recycle", True, "data.slice", "{...}", "a slice is read in whole sequences")


# --- the number of sequences ------------------------------------------------------------------------------------------


@rule("warmup.batch_size: start duration")
def check_batch_size_duration(size: BatchSizeWarmup) -> Iterator[Problem]:
    """A warmup of the batch size has a duration."""
    if size.start is not None and size.duration is None:
        yield required("warmup.batch_size.duration", "the steps or tokens until batch.global_batch_size is reached")


@rule("warmup.batch_size: start increment", BATCH_SIZES, LAYOUT, WORLD_SIZE)
def check_batch_size_warmup(
    size: BatchSizeWarmup, batch: BatchConfig, parallel: ParallelConfig, world_size: int | None
) -> Iterator[Problem]:
    """Every size is a number of whole micro-batches, at least one for each replica."""
    if size.start is None or not has_batch_sizes(batch):
        return
    full, micro, _ = batch_sizes(batch)
    step = size.increment or micro
    if step % micro:
        why = "a step has whole micro-batches"
        yield from must_be_multiple("warmup.batch_size.increment", step, "batch.micro_batch_size", micro, why)
        return
    increment = "batch.micro_batch_size" if size.increment is None else "warmup.batch_size.increment"
    for field, value in (("warmup.batch_size.start", size.start), ("batch.global_batch_size", full)):
        yield from must_be_multiple(field, value, increment, step, "sizes grow by it")
    least = micro * most_replicas(parallel, world_size)
    if not least <= size.start <= full:
        yield Problem(
            field="warmup.batch_size.start",
            value=size.start,
            rule=f"must be from {least}, a micro-batch for each replica, to batch.global_batch_size ({full})",
            fix="Change it, batch.micro_batch_size or the number of replicas",
        )
