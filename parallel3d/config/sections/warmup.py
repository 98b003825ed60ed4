"""The configuration's section `warmup`: shorter sequences first, or fewer. Its rules are in warmup_rules.py, the
formulas in parallel3d/size_schedule.py."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from parallel3d.config.sections.section import Section


class SequenceLengthWarmup(Section):
    """Shorter sequences first, always batch.global_batch_size of them. Evaluations use the full length."""

    kind: Literal["none", "linear", "root", "discrete", "periodic", "adaptive", "variance", "custom"] = "none"
    """How the length changes during the run. none: batch.sequence_length throughout; all other fields are ignored.
    linear, root: from start to end over duration. discrete: lengths, one after the other (Shortformer uses two).
    periodic: lengths in a cycle. adaptive: one multiple longer after each evaluation whose perplexity is at most
    tolerance x the best one so far, otherwise shorter. variance: one multiple longer after `interval` steps in a row
    in which the largest element of Adam's sqrt(v) did not jump, shorter after a jump. custom: by a function."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit of duration and until. tokens are those trained on, which carry over to other batch sizes: a step has the
    length that belongs to its first token, counted from 1; with steps, to its number."""
    start: PositiveInt = 8
    """First length of linear, root, adaptive and variance. The paper uses 8, or 64 for models of a billion
    parameters."""
    end: PositiveInt | None = None
    """Last length of linear, root, adaptive and variance. Null: batch.sequence_length."""
    duration: PositiveInt | None = None
    """Steps or tokens until linear and root reach the end."""
    exponent: PositiveFloat = 0.5
    """Exponent of root: start + (end - start) * (step / duration) ** exponent. DeepSpeed's root_degree is its
    inverse."""
    lengths: list[PositiveInt] = []
    """Lengths of discrete and periodic, in order."""
    until: list[PositiveInt] = []
    """Last step, or token, of each length. For discrete: of all but the last length. For periodic: of every length,
    within one period: [900, 1000] is 900 steps of the first length and 100 of the second, in a cycle."""
    function: str | None = None
    """Function of custom, "module:function": takes the number of the step, or of its first token, and returns the
    length. Must depend on nothing else."""
    tolerance: PositiveFloat = 1.3
    """For adaptive: how many times the best perplexity an evaluation may have. The paper counts 1.3 as a
    fluctuation. For variance: how many times the mean of the last `interval` values the largest sqrt(v) may be."""
    on_fluctuation: Literal["shrink", "hold"] = "shrink"
    """For adaptive and variance: what follows a value above the tolerance. shrink: one multiple shorter. hold: the
    same length."""
    interval: PositiveInt = 20
    """For variance: calm steps in a row after which the length grows, and values of which the mean is taken."""
    multiple: PositiveInt = 8
    """All lengths are multiples of it, which kernels prefer: 8, or 16 for 8-bit formats; with
    parallel.sequence_parallel also of parallel.tp_size. A larger one gives fewer lengths, each of which has its own
    kernels and buffers."""
    recycle: bool = False
    """false: a lane advances by batch.sequence_length each step, and tokens beyond the step's length are dropped, as in
    the paper. true: it advances by what is trained on, so that no token is dropped and each is trained on once."""


class BatchSizeWarmup(Section):
    """Fewer sequences first: only the first slots are used, and only their lanes advance (GPT-3: 16 to 256 over 4B
    tokens)."""

    start: PositiveInt | None = None
    """Sequences of the first step: a multiple of increment, and at least one micro-batch for each replica of a stage.
    Null: no warmup."""
    duration: PositiveInt | None = None
    """Steps or tokens until batch.global_batch_size is reached, linearly."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit of duration."""
    increment: PositiveInt | None = None
    """All sizes are multiples of it; itself a multiple of batch.micro_batch_size. Each size has its own pipeline
    schedule. Null: batch.micro_batch_size."""


class WarmupConfig(Section):
    """Smaller steps first. The learning rate's warmup is lr_schedule.warmup_steps."""

    sequence_length: SequenceLengthWarmup = SequenceLengthWarmup()
    """Shorter sequences first, always batch.global_batch_size of them. Evaluations use the full length."""
    batch_size: BatchSizeWarmup = BatchSizeWarmup()
    """Fewer sequences first."""


FIELDS_BY_KIND = {
    "linear": ("start", "end", "duration", "unit"),
    "root": ("start", "end", "duration", "unit", "exponent"),
    "discrete": ("lengths", "until", "unit"),
    "periodic": ("lengths", "until", "unit"),
    "adaptive": ("start", "end", "tolerance", "on_fluctuation"),
    "variance": ("start", "end", "tolerance", "on_fluctuation", "interval"),
    "custom": ("function", "unit"),
    "none": (),
}
"""Fields of SequenceLengthWarmup that each kind reads, besides multiple and recycle."""
