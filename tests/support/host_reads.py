"""Calls with which the host would wait for a device, in the code that a device runs.

In layers/, optim/ and pipeline/ the host reads a device's numbers through `HostCopy.read` alone, which waits once for
many; HOST_READS lists what is left, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from tests.support.waits import calls_with_function

FOLDERS = ("parallel3d/layers/", "parallel3d/optim/", "parallel3d/pipeline/", "parallel3d/kernels/")
READING_METHODS = frozenset({"item", "tolist", "cpu", "synchronize"})

HOST_READS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("parallel3d/layers/document_marks.py", "document_lengths"): "numpy's, before the tokens go to the device",
        ("parallel3d/layers/document_marks.py", "split_document_marks"): "of a message, still on the host",
        ("parallel3d/pipeline/wide_simulator.py", "_listed"): "numpy's",
        ("parallel3d/optim/measure.py", "_exact_sum"): "exact sums, which are for tests",
    }
)
"""(file, function) -> why its calls do not make the host wait, or may."""


def check_host_reads(path: str, source: str) -> Iterator[str]:
    """.item(), .tolist(), .cpu(), synchronize() and bool(...) in the code that a device runs."""
    if not path.startswith(FOLDERS):
        return
    for call, function in calls_with_function(ast.parse(source)):
        name = getattr(function, "name", "")
        if reads_device(call) and (path, name) not in HOST_READS:
            yield f"{path}:{call.lineno}: {ast.unparse(call)} makes the host wait for a device: use HostCopy"


def reads_device(call: ast.Call) -> bool:
    """Whether the call reads a tensor's numbers, other than those of a `HostCopy`."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "bool" and any(isinstance(node, ast.Call) for node in call.args)
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in READING_METHODS:
        return False
    return ".read()" not in ast.unparse(call.func.value)
