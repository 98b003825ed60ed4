"""C functions, compiled at their first use if the machine has a C compiler; those of random_bits.c are called here.

They take 0.1 to 0.2 ns an element where torch's operators take 2 to 3. The compiler needs 0.3 to 0.6 s, once for each
source and CPU: the library is kept in ~/.cache/parallel3d. Without a compiler the callers use torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

_RANDOM_BITS = Path(__file__).with_name("random_bits.c")
_COMMAND = ("cc", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
_TIMEOUT_S = 600.0
"""All ranks of a host may compile at once, on busy cores; a rank without its library would end the run."""
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def run_loop(name: str, *arguments: Tensor | int) -> bool:
    """Calls the C function `name` of random_bits.c; False: there is none, and torch's operators give the same bits."""
    library = loop_library(_RANDOM_BITS)
    if library is None:
        return False
    call_loop(library, name, *arguments)
    return True


def call_loop(library: ctypes.CDLL, name: str, *arguments: Tensor | int | float | None) -> None:
    """Calls a C function with contiguous CPU tensors, integers of up to 64 bits, doubles, and null pointers."""
    # ctypes releases the interpreter's lock: other ranks of this process go on
    getattr(library, name)(*map(_argument, arguments))


def _argument(argument: Tensor | int | float | None) -> ctypes.c_uint64 | ctypes.c_double:
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    if isinstance(argument, Tensor):
        assert argument.is_contiguous() and argument.device.type == "cpu"
        argument = argument.data_ptr()
    return ctypes.c_uint64((argument or 0) & (2**64 - 1))


@cache
def loop_library(source: Path, *flags: str) -> ctypes.CDLL | None:
    """The functions of a C file, compiled with some flags more; None without a compiler that knows them."""
    try:
        return _load(source, flags, Path.home() / ".cache" / "parallel3d")
    except (OSError, RuntimeError, subprocess.SubprocessError):
        pass  # no home, or one that can't be written to
    try:
        with TemporaryDirectory() as folder:
            return _load(source, flags, Path(folder))
    except (OSError, subprocess.SubprocessError):
        return None


def _load(source: Path, flags: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Loads the library from `folder`, and compiles it if it is not there."""
    path = folder / f"{source.stem}-{source_digest(source, *_COMMAND, *flags, platform.machine(), _cpu())}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryDirectory(dir=folder) as work:
            made = Path(work) / path.name
            command = [*_COMMAND, *flags, "-o", str(made), str(source)]
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
            made.rename(path)  # whole or not at all: other processes do the same
    return ctypes.CDLL(str(path))


def source_digest(source: Path, *more: str) -> str:
    """Returns 16 hexadecimal digits, other ones if a C file, a header that it includes, or `more` has changed."""
    text = "".join(_with_included(source)) + " ".join(more)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _with_included(source: Path) -> Iterator[str]:
    """The text of a C file and of the headers that it includes."""
    text = source.read_text()
    yield text
    for name in _INCLUDE.findall(text):
        yield from _with_included(source.parent / name)


def multiplies_bf16() -> bool:
    """Whether the processor has instructions for products of bf16 numbers; False where Linux doesn't say."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(_cpu().split())


@cache
def _cpu() -> str:
    """What "native" means on this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
