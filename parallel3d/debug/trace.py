"""Traces steps with torch's profiler: the time of each instruction of the pipeline.

The trace is in Chrome's JSON format, for chrome://tracing or ui.perfetto.dev. Each step is a range "step N"; in it each
instruction is a range, named as in the plan ("forward 3", "send activation 3 -> (1, 0)"), with torch's operators and,
on a GPU, its kernels inside.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallel3d.config.schema import ProfileConfig
from parallel3d.pipeline.executor import NO_LABEL
from parallel3d.pipeline.instructions import Instruction


class NoTrace:
    """Records nothing."""

    def label(self, instruction: Instruction) -> AbstractContextManager[object]:
        """A range of the trace, named after the instruction."""
        return NO_LABEL

    def begin_step(self, step: int) -> None:
        """Ends the trace of the step before."""

    def close(self) -> None:
        """Ends the trace at the end of the run."""


class StepTrace(NoTrace):
    """Records steps `first` to `last` of this process, and writes them to `path` after the last."""

    def __init__(self, path: Path, *, first: int, last: int, device: torch.device):
        self._path = path
        self._steps = range(first, last + 1)
        self._profile: profile | None = None
        self._step: AbstractContextManager[object] = NO_LABEL
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]

    def label(self, instruction: Instruction) -> AbstractContextManager[object]:
        return record_function(str(instruction)) if self._profile is not None else NO_LABEL

    def begin_step(self, step: int) -> None:
        self._end_step()
        if step not in self._steps:
            self.close()
            return
        if self._profile is None:
            self._profile = profile(activities=self._activities)
            self._profile.start()
        self._step = record_function(f"step {step}")
        self._step.__enter__()

    def close(self) -> None:
        self._end_step()
        if self._profile is not None:
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None

    def _end_step(self) -> None:
        self._step.__exit__(None, None, None)
        self._step = NO_LABEL


def make_trace(config: ProfileConfig, *, rank: int, directory: Path, device: torch.device) -> NoTrace:
    """The trace that the configuration asks of this rank, written to `directory`."""
    if not config.steps or rank not in config.ranks:
        return NoTrace()
    first, last = config.steps
    return StepTrace(directory / f"rank-{rank}.json", first=first, last=last, device=device)
