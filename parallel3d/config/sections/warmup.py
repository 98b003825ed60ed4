"""The sections for warmups of the batch: shorter sequences first, or fewer. parallel3d/size_schedule.py has the
formulas."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from parallel3d.config.sections.base import Section


class SequenceLengthWarmup(Section):
    """Shorter sequences first, of all of batch.global_batch_size; evaluations have the full length."""

    kind: Literal["none", "linear", "root", "discrete", "periodic", "adaptive", "custom"] = "none"
    """How the length follows the run. linear, root: from start to end over duration. discrete: lengths, one after the
    other (Shortformer: two); periodic: the same over and over. adaptive: a multiple longer after each evaluation whose
    perplexity is at most tolerance x the best one so far, else shorter. custom: by a function."""
    unit: Literal["steps", "tokens"] = "steps"
    """What duration and until count; tokens are those trained on, so that they carry over to other batch sizes. A
    step's length is that of its number, or its first token's number, counted from 1."""
    start: PositiveInt = 8
    """The first length of linear, root and adaptive. The paper: 8, or 64 for models of a billion parameters."""
    end: PositiveInt | None = None
    """Their last length. Null: batch.sequence_length."""
    duration: PositiveInt | None = None
    """Steps or tokens until linear and root reach the end."""
    exponent: PositiveFloat = 0.5
    """Of root: start + (end - start) * (step / duration) ** exponent. DeepSpeed's root_degree is its inverse."""
    lengths: list[PositiveInt] = []
    """Lengths of discrete and periodic, in order."""
    until: list[PositiveInt] = []
    """The last step, or token, of each of the lengths: for discrete of all but the last one; for periodic of all,
    within a period: [900, 1000] is 900 steps of the first length and 100 of the second, again and again."""
    function: str | None = None
    """Of custom, "module:function": gets the number of the step, or of its first token, returns the length. It must
    depend on nothing else."""
    tolerance: PositiveFloat = 1.3
    """Of adaptive: an evaluation's perplexity may be so many times the best one; the paper's mark of a fluctuation."""
    on_fluctuation: Literal["shrink", "hold"] = "shrink"
    """Of adaptive: what follows a worse one; shrink: a multiple shorter, hold: as long as before."""
    multiple: PositiveInt = 8
    """All lengths are multiples of it, which kernels like: 8, for 8-bit formats 16; with parallel.sequence_parallel
    also of parallel.tp_size. A coarser one gives fewer lengths, each with kernels and buffers of its own."""
    recycle: bool = False
    """false: a lane moves on by batch.sequence_length each step, and what is beyond the step's length is dropped, as in
    the paper. true: it moves on by what is trained on, so that no text is dropped and each token is trained on once."""


class BatchSizeWarmup(Section):
    """Fewer sequences first, those of the first slots, whose lanes alone move (GPT-3: 16 to 256 over 4B tokens)."""

    start: PositiveInt | None = None
    """Sequences of the first step: a multiple of increment, and a micro-batch for each replica of a stage at least.
    Null: batch.global_batch_size from the start."""
    duration: PositiveInt | None = None
    """Steps or tokens until batch.global_batch_size is reached, linearly."""
    unit: Literal["steps", "tokens"] = "steps"
    """What duration counts."""
    increment: PositiveInt | None = None
    """All sizes are multiples of it: itself one of batch.micro_batch_size. Each size has a schedule of its own. Null:
    batch.micro_batch_size."""


class WarmupConfig(Section):
    """Steps that are smaller at first; the learning rate's warmup is lr_schedule.warmup_steps."""

    sequence_length: SequenceLengthWarmup = SequenceLengthWarmup()
    """Shorter sequences first, of all of batch.global_batch_size; evaluations have the full length."""
    batch_size: BatchSizeWarmup = BatchSizeWarmup()
    """Fewer sequences first."""


class CurriculumSchedule(Section):
    """The details of a DeepSpeed curriculum."""

    total_curriculum_step: PositiveInt | None = None
    """Of fixed_linear and fixed_root: the steps until max_difficulty."""
    difficulty_step: PositiveInt | None = None
    """Of these: all lengths are multiples of it."""
    root_degree: PositiveInt | None = None
    """Of fixed_root: the inverse of the exponent."""
    difficulty: list[PositiveInt] = []
    """Of fixed_discrete: the lengths."""
    max_step: list[PositiveInt] = []
    """Of fixed_discrete: the last step of each but the last."""


class CurriculumLearning(Section):
    """DeepSpeed's block of the same name as it stands in its configuration: another way to say
    warmup.sequence_length, with the same length at every step."""

    enabled: bool = False
    """Whether it counts."""
    curriculum_type: Literal["seqlen"] = "seqlen"
    """What gets more difficult: the sequences' length."""
    min_difficulty: PositiveInt | None = None
    """The first length."""
    max_difficulty: PositiveInt | None = None
    """The last length; at most batch.sequence_length."""
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = None
    """linear, root and discrete of warmup.sequence_length; custom is given there."""
    schedule_config: CurriculumSchedule = CurriculumSchedule()
    """The details."""
