"""Chooses between the torch form and the Triton form of a run's kernels (`run.kernels`)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch

from parallel3d.accelerator import is_accelerator
from parallel3d.errors import ConfigError, Problem

KernelForm = Literal["torch", "triton"]


def choose_kernels(asked: str, device: torch.device) -> KernelForm:
    """The form for the value "auto", "torch" or "triton" of `run.kernels`: auto is Triton on a GPU, if it is installed.

    Raises ConfigError where Triton is required and can't run. On a CPU it runs only in its interpreter
    (TRITON_INTERPRET=1), for tests.
    """
    if asked == "torch":
        return "torch"
    if find_spec("triton") is None:
        lack = "Triton is not installed"
    elif is_accelerator(device) or (asked == "triton" and is_interpreted()):
        return "triton"
    else:
        lack = f"the run is on {device.type}, and Triton's kernels are for GPUs"
    if asked == "auto":
        return "torch"
    fix = "Use torch or auto, or install Triton and run on a GPU"
    raise ConfigError([Problem(field="run.kernels", value=asked, rule=lack, fix=fix)])


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return bool(import_module("triton").knobs.runtime.interpret)
