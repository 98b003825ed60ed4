"""The C functions of random_bits.c, compiled at their first use if the machine has a C compiler.

They take 0.1 to 0.2 ns an element where torch's operators take 2 to 3. The compiler needs 0.3 s, once for each source
and CPU: the library is kept in ~/.cache/parallel3d. Without a compiler the callers use torch, with the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

_SOURCE = Path(__file__).with_name("random_bits.c")
_COMMAND = ("cc", "-O3", "-march=native", "-shared", "-fPIC")
_TIMEOUT_S = 60.0


def run_loop(name: str, *arguments: Tensor | int) -> bool:
    """Calls the C function `name`, with contiguous CPU tensors and integers of up to 64 bits; False: there is none."""
    library = _library()
    if library is None:
        return False
    # ctypes releases the interpreter's lock: other ranks of this process go on
    getattr(library, name)(*(ctypes.c_uint64(_word(each)) for each in arguments))
    return True


def _word(argument: Tensor | int) -> int:
    if isinstance(argument, int):
        return argument & (2**64 - 1)
    assert argument.is_contiguous() and argument.device.type == "cpu"
    return argument.data_ptr()


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return _load(Path.home() / ".cache" / "parallel3d")
    except (OSError, RuntimeError, subprocess.SubprocessError):
        pass  # no home, or one that can't be written to
    try:
        with TemporaryDirectory() as folder:
            return _load(Path(folder))
    except (OSError, subprocess.SubprocessError):
        return None


def _load(folder: Path) -> ctypes.CDLL:
    """Loads the library from `folder`, and compiles it if it is not there."""
    text = _SOURCE.read_text() + " ".join((*_COMMAND, platform.machine(), _cpu()))
    path = folder / f"random_bits-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryDirectory(dir=folder) as work:
            made = Path(work) / path.name
            command = [*_COMMAND, "-o", str(made), str(_SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
            made.rename(path)  # whole or not at all: other processes do the same
    return ctypes.CDLL(str(path))


def _cpu() -> str:
    """What "native" means on this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
