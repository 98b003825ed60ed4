"""The configuration's section `debug`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from parallel3d.config.rule import WORLD_SIZE, rule
from parallel3d.config.sections.parallel import LAYOUT, ParallelConfig, num_ranks
from parallel3d.config.sections.section import Section
from parallel3d.errors import Problem


class ProfileConfig(Section):
    """Traces by torch's profiler."""

    steps: list[PositiveInt] = []
    """First and last step to record, in one trace. Empty: none."""
    ranks: list[NonNegativeInt] = [0]
    """Ranks that record; each writes profile/rank-N.json to the run's folder, for chrome://tracing or Perfetto."""


class DumpConfig(Section):
    """Tensors of single steps as files."""

    steps: list[PositiveInt] = []
    """Steps to dump: weights, activations, their gradients, gradients of parameters. Empty: none."""
    names: Annotated[list[str], Field(min_length=1)] = ["*"]
    """Glob patterns of what to dump, such as "layers.3.*" or "*.grad": NAME.input and NAME.output of every module, each
    with its .grad, head.logits, and parameters by their names. Each rank keeps what it dumps until the end of the
    step."""
    directory: str | None = None
    """Folder of the dumps. Null: dumps in the run's folder."""


class DebugConfig(Section):
    """Debugging options."""

    dump_tensors: DumpConfig = DumpConfig()
    """Tensors of single steps as files, for launch/compare_dumps.py."""
    replica_check_every: PositiveInt | None = None
    """Steps between two checks that all copies have the same bits: weights of a stage's replicas, weights that all
    tensor-parallel ranks hold, optimizer state of an owner and its backup. Null: never."""
    replica_check_action: Literal["stop", "warn"] = "stop"
    """What follows if copies differ: stop ends the run with exit code 5, warn reports it at every check."""
    profile: ProfileConfig = ProfileConfig()
    """Traces by torch's profiler."""
    slow_step_factor: PositiveFloat | None = 10.0
    """A step that takes this many times the median of the previous steps is slow: a hang report shows where every rank
    is and which rank it waits for, and each rank writes its stacks to its log. The run continues. Null: never."""
    slow_step_min_s: PositiveFloat = 30.0
    """No step is slow before this many seconds; before the third step and during evaluations ten times as many."""


@rule("debug.profile", "run.num_steps", LAYOUT, WORLD_SIZE)
def check_profile(
    profile: ProfileConfig, num_steps: int | None, parallel: ParallelConfig, world_size: int | None
) -> Iterator[Problem]:
    """Traces are of steps and ranks that exist."""
    steps = profile.steps
    if steps and (len(steps) != 2 or steps[0] > steps[1] or (num_steps is not None and steps[1] > num_steps)):
        rule_text = "must be the first and the last step to record"
        if num_steps is not None:
            rule_text += f", the last at most run.num_steps ({num_steps})"
        yield Problem(field="debug.profile.steps", value=steps, rule=rule_text, fix="Give two steps, such as [10, 12]")
    last = (num_ranks(parallel, None) if world_size is None else world_size) - 1
    if profile.ranks and max(profile.ranks) > last:
        rule_text = f"has a rank that doesn't exist: the last rank is {last}"
        yield Problem(field="debug.profile.ranks", value=profile.ranks, rule=rule_text, fix="Use existing ranks")


@rule("debug.dump_tensors.steps", "run.num_steps")
def check_dumps(steps: list[int], num_steps: int | None) -> Iterator[Problem]:
    """Dumps are of steps that exist."""
    if steps and num_steps is not None and max(steps) > num_steps:
        rule_text = f"has a step that doesn't exist: the last is run.num_steps ({num_steps})"
        yield Problem(field="debug.dump_tensors.steps", value=steps, rule=rule_text, fix="Use existing steps")
