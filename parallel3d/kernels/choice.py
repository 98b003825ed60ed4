"""Chooses the form of a run's kernels (`run.kernels`): torch's operators, Triton's for GPUs, or C's for CPUs."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch

from parallel3d.accelerator import is_accelerator
from parallel3d.errors import ConfigError, Problem
from parallel3d.kernels.c_loops import has_c_loops

KernelForm = Literal["torch", "triton", "c"]


def choose_kernels(asked: str, device: torch.device, *, agreed: KernelForm = "torch") -> KernelForm:
    """The form for a value of `run.kernels`: auto is Triton on a GPU, if it is installed, and on CPUs what the ranks
    have `agreed` on.

    Raises ConfigError where a form is required and can't run. On a CPU Triton runs only in its interpreter
    (TRITON_INTERPRET=1), for tests.
    """
    form = asked if asked != "auto" else "triton" if is_accelerator(device) else agreed
    if form == "torch":
        return "torch"
    lack = _lack_of_c(device) if form == "c" else _lack_of_triton(device, is_asked=asked == "triton")
    if lack is None:
        return "c" if form == "c" else "triton"
    if asked == "auto" and form == "triton":
        return "torch"
    fixes = {
        "c": "Use torch, or install a C compiler",
        "triton": "Use torch or auto, or install Triton and run on a GPU",
    }
    raise ConfigError([Problem(field="run.kernels", value=asked, rule=lack, fix=fixes[form])])


def _lack_of_c(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"the run is on {device.type}, and kernels in C are for CPUs"
    return None if has_c_loops() else "this machine has no C compiler with OpenMP (cc), and the run's kernels are in C"


def _lack_of_triton(device: torch.device, *, is_asked: bool) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if is_accelerator(device) or (is_asked and is_interpreted()):
        return None
    return f"the run is on {device.type}, and Triton's kernels are for GPUs"


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return bool(import_module("triton").knobs.runtime.interpret)
