"""Traces of some steps by torch's profiler: what each instruction of the schedule spends its time on.

The trace is Chrome's JSON format, for chrome://tracing or ui.perfetto.dev. Each step is a range named "step N", with a
range for each instruction in it, named as in the plan ("forward 3", "send activation 3 -> (1, 0)"), and torch's
operators, and the device's kernels where there is one, within those.
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
        """A range of the trace, named like the instruction."""
        return NO_LABEL

    def begin_step(self, step: int) -> None:
        """Steps before `step` are over."""

    def close(self) -> None:
        """The run is over."""


class StepTrace(NoTrace):
    """Records steps `first` to `last` on this process' threads, and writes them to `path` when they are over."""

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
    """What the configuration asks of this rank: traces go into `directory`."""
    if not config.steps or rank not in config.ranks:
        return NoTrace()
    first, last = config.steps
    return StepTrace(directory / f"rank-{rank}.json", first=first, last=last, device=device)
