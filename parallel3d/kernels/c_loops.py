"""Calls the functions of layer_loops.c, attention_loops.c and weight_grad_loops.c, on as many threads as torch uses."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.compiled_loops import call_loop, loop_library, source_digest

_LAYERS, _ATTENTION, _WEIGHT_GRAD = (
    Path(__file__).with_name(f"{name}_loops.c") for name in ("layer", "attention", "weight_grad")
)
_FORMATS = (torch.bfloat16, torch.float32)


def has_c_loops() -> bool:
    """Whether this machine has a C compiler with OpenMP; the first call compiles."""
    return _library(_LAYERS) is not None


def has_attention_loop(dtype: torch.dtype) -> bool:
    """Whether the machine's processor has the instructions that attention's loops in this format need."""
    needed = {torch.float32: "attention", torch.bfloat16: "attention_multiplies_bf16"}
    return dtype in needed and hasattr(_library(_ATTENTION), needed[dtype])


@cache
def has_tiles() -> bool:
    """Whether loops in bf16 can use AMX: there is a C compiler, the processor has it and the kernel lets this process
    use it."""
    library = _library(_WEIGHT_GRAD)
    return library is not None and library.has_tiles() != 0


def timed_loops() -> tuple[str, ...]:
    """Identifies the code of the loops that a run times against torch's products and attention."""
    return tuple(map(source_digest, (_ATTENTION, _WEIGHT_GRAD)))


def fits_c_loops(x: Tensor, wide_dtype: torch.dtype) -> bool:
    """Whether there is a C form for x, computed in `wide_dtype`: bf16 or fp32 in memory, fp32 in between."""
    return x.dtype in _FORMATS and wide_dtype is torch.float32 and x.device.type == "cpu"


def run_layer_loop(name: str, *arguments: Tensor | int | float | None) -> None:
    """Calls a function of layer_loops.c, whose last argument is the number of threads."""
    run_loop_of(_LAYERS, name, *arguments)


def run_attention_loop(name: str, *arguments: Tensor | int | float | None) -> None:
    """Calls a function of attention_loops.c, whose last argument is the number of threads."""
    run_loop_of(_ATTENTION, name, *arguments)


def run_weight_grad_loop(name: str, *arguments: Tensor | int | float | None) -> None:
    """Calls a function of weight_grad_loops.c, whose last argument is the number of threads."""
    run_loop_of(_WEIGHT_GRAD, name, *arguments)


def run_loop_of(source: Path, name: str, *arguments: Tensor | int | float | None) -> None:
    """Calls a function of a C file, whose last argument is the number of threads."""
    library = _library(source)
    assert library is not None, "run.kernels c was chosen without a compiler"
    call_loop(library, name, *arguments, torch.get_num_threads())


def is_narrow(x: Tensor) -> int:
    """The functions' argument of that name: 1 for bf16, 0 for fp32."""
    return int(x.dtype is torch.bfloat16)


def _library(source: Path) -> ctypes.CDLL | None:
    return loop_library(source, "-fopenmp")
