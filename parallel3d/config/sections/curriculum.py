"""The configuration's section `curriculum_learning`: DeepSpeed's form of warmup.sequence_length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveInt

from parallel3d.config.rule import excludes, required, rule
from parallel3d.config.sections.section import Section
from parallel3d.config.sections.warmup import FIELDS_BY_KIND, SequenceLengthWarmup
from parallel3d.errors import Problem

REQUIRED_FIELDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}
"""Fields of schedule_config that each of DeepSpeed's kinds requires."""

KINDS = {"fixed_linear": "linear", "fixed_root": "root", "fixed_discrete": "discrete"}
"""DeepSpeed's schedule_type and our kind."""


class CurriculumSchedule(Section):
    """Details of a DeepSpeed curriculum."""

    total_curriculum_step: PositiveInt | None = None
    """For fixed_linear and fixed_root: the steps until max_difficulty."""
    difficulty_step: PositiveInt | None = None
    """For fixed_linear and fixed_root: all lengths are multiples of it."""
    root_degree: PositiveInt | None = None
    """For fixed_root: the inverse of the exponent."""
    difficulty: list[PositiveInt] = []
    """For fixed_discrete: the lengths."""
    max_step: list[PositiveInt] = []
    """For fixed_discrete: the last step of each length but the last."""


class CurriculumLearning(Section):
    """DeepSpeed's block of the same name, unchanged: an alternative to warmup.sequence_length that gives the same
    length as DeepSpeed at every step."""

    enabled: bool = False
    """Whether the block applies."""
    curriculum_type: Literal["seqlen"] = "seqlen"
    """What becomes more difficult: the sequences' length."""
    min_difficulty: PositiveInt | None = None
    """The first length."""
    max_difficulty: PositiveInt | None = None
    """The last length; at most batch.sequence_length. A fixed_discrete schedule stays at the first length that reaches
    it, as DeepSpeed's does."""
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = None
    """linear, root and discrete of warmup.sequence_length; for custom use that section."""
    schedule_config: CurriculumSchedule = CurriculumSchedule()
    """Details of the schedule."""


def from_deepspeed(block: CurriculumLearning) -> SequenceLengthWarmup:
    """The warmup that a block with all required fields describes."""
    schedule, kind = block.schedule_config, KINDS[str(block.schedule_type)]
    lengths, until, num_lengths = schedule.difficulty, schedule.max_step, num_lengths_used(block)
    if num_lengths > 1 and len(until) == len(lengths) - 1:  # otherwise rules refuse the block as it is written
        lengths, until = lengths[:num_lengths], until[: num_lengths - 1]
    fields = dict(
        start=block.min_difficulty,
        end=block.max_difficulty,
        duration=schedule.total_curriculum_step,
        exponent=1.0 / schedule.root_degree if schedule.root_degree else None,
        lengths=lengths,
        until=until,
        multiple=schedule.difficulty_step,
    )
    given = {name: value for name, value in fields.items() if value and name in ("multiple", *FIELDS_BY_KIND[kind])}
    return SequenceLengthWarmup.model_validate({"kind": kind, **given})


def num_lengths_used(block: CurriculumLearning) -> int:
    """Lengths of a fixed_discrete schedule that DeepSpeed ever uses.

    Its CurriculumScheduler.update_difficulty asks for no further length once max_difficulty is reached, so lengths
    after the first one that reaches it are never used, whether they are longer or shorter.
    """
    lengths = block.schedule_config.difficulty
    reached = (number for number, length in enumerate(lengths, start=1) if length >= (block.max_difficulty or 0))
    return next(reached, len(lengths))


def is_complete(block: CurriculumLearning) -> bool:
    """Whether an enabled block has what DeepSpeed requires, so that `from_deepspeed` can read it."""
    return not any(_missing_fields(block)) and block.schedule_type != "custom"


def _missing_fields(block: CurriculumLearning) -> Iterator[Problem]:
    for name in ("min_difficulty", "max_difficulty", "schedule_type"):
        if getattr(block, name) is None:
            yield required(f"curriculum_learning.{name}", "DeepSpeed requires it")
    for name in REQUIRED_FIELDS.get(str(block.schedule_type), ()):
        if not getattr(block.schedule_config, name):
            yield required(f"curriculum_learning.schedule_config.{name}", f"{block.schedule_type} requires it")


@rule("curriculum_learning")
def check_completeness(block: CurriculumLearning) -> Iterator[Problem]:
    """An enabled block can be read."""
    if not block.enabled:
        return
    if block.schedule_type == "custom":
        yield Problem(
            field="curriculum_learning.schedule_type",
            value="custom",
            rule="takes a function that a program passes to DeepSpeed, which this configuration can't name",
            fix='Use warmup.sequence_length with {"kind": "custom", "function": "module:function"}',
        )
    else:
        yield from _missing_fields(block)


@rule("curriculum_learning")
def check_discrete_limits(block: CurriculumLearning) -> Iterator[Problem]:
    """DeepSpeed leaves the first length of a fixed_discrete schedule."""
    if not (block.enabled and block.schedule_type == "fixed_discrete" and is_complete(block)):
        return
    first, last = block.min_difficulty, block.max_difficulty
    assert first is not None and last is not None, "the block is complete"
    if first >= last:
        rule_text = (
            f"must be below curriculum_learning.max_difficulty ({last}): DeepSpeed never changes the length else"
        )
        yield Problem(field="curriculum_learning.min_difficulty", value=first, rule=rule_text, fix="Change one of them")
    elif num_lengths_used(block) == 1:
        yield Problem(
            field="curriculum_learning.schedule_config.difficulty",
            value=block.schedule_config.difficulty,
            rule=f"must not start with a length that reaches max_difficulty ({last}): DeepSpeed stays there",
            fix="Raise max_difficulty to the longest length",
        )


@rule("curriculum_learning.enabled", "warmup.sequence_length.kind")
def check_single_form(enabled: bool, kind: str) -> Iterator[Problem]:
    """The warmup of the sequence length is given once."""
    if enabled and kind != "none":
        why = "both describe the warmup of the sequence length"
        yield excludes("curriculum_learning", "enabled", "warmup.sequence_length.kind", kind, why)
