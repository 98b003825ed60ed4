"""The configuration's section `debug`, and its rules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from parallel3d.config.sections.base import Section


class ProfileConfig(Section):
    """Traces by torch's profiler."""

    steps: list[PositiveInt] = []
    """First and last step to record: one trace for all of them. Empty: none."""
    ranks: list[NonNegativeInt] = [0]
    """Ranks that record; each writes profile/rank-N.json into the run's folder, for chrome://tracing or Perfetto."""


class DumpConfig(Section):
    """Tensors of single steps as files."""

    steps: list[PositiveInt] = []
    """Steps to dump: weights, activations, their gradients, gradients of parameters. Empty: none."""
    names: Annotated[list[str], Field(min_length=1)] = ["*"]
    """Globs of what to dump, such as "layers.3.*" or "*.grad": NAME.input and NAME.output of every module, each with
    its .grad, head.logits, and parameters by their names. Each rank holds what it dumps until the step's end."""
    directory: str | None = None
    """Folder of the dumps. Null: dumps in the run's folder."""


class DebugConfig(Section):
    """Aids for the case that something is wrong."""

    dump_tensors: DumpConfig = DumpConfig()
    """Tensors of single steps as files, for launch/compare_dumps.py."""

    replica_check_every: PositiveInt | None = None
    """Steps between two checks that all copies are the same bits: weights of a stage's replicas, weights that all
    tensor-parallel ranks hold, optimizer state of an owner and its backup. Null: never."""
    replica_check_action: Literal["stop", "warn"] = "stop"
    """What a copy that differs leads to: stop ends the run with exit code 5, warn says so at every check."""
    profile: ProfileConfig = ProfileConfig()
    """Traces by torch's profiler."""
    slow_step_factor: PositiveFloat | None = 10.0
    """A step that takes so many times the median of the steps before is overdue: a table says where every rank is and
    whom it waits for, and each writes its stacks into its log. The run goes on. Null: never."""
    slow_step_min_s: PositiveFloat = 30.0
    """No step is overdue before so many seconds; ten times as long before the third step and while evaluating."""
