"""What kernels must not use, for their results to depend on the numbers and their global indices alone.

An atomic addition adds in the order in which programs happen to end; work shared out by the number of multiprocessors
or of programs gives other partial sums on another GPU or another grid.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import MappingProxyType

FOLDER = "parallel3d/kernels/"

GRID_READS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("parallel3d/kernels/triton_sums.py", "_reduce_blocks"): "the length of a row of its result",
        ("parallel3d/kernels/triton_update.py", "_measure"): "the length of a row of its result",
    }
)
"""(file, function) -> why it may ask for the number of programs."""


def check_grid_reads(path: str, source: str) -> Iterator[str]:
    """Atomic operations, and the number of multiprocessors or programs, in kernels."""
    if not path.startswith(FOLDER):
        return
    for line, name, function in names_of_the_launch(source):
        if name != "num_programs" or (path, function) not in GRID_READS:
            yield f"{path}:{line}: {name} makes results depend on the launch: use fixed blocks of global indices"


def names_of_the_launch(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, name, the function around it or "") of each atomic operation and each size of the GPU or the grid."""
    module = ast.parse(source)
    for top in module.body:
        for node in ast.walk(top):
            for name in _names(node):
                if name.startswith("atomic_") or name == "multi_processor_count" or _is_grid_size(node, name):
                    yield getattr(node, "lineno", 0), name, getattr(top, "name", "")


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.name for alias in node.names)


def _is_grid_size(node: ast.AST, name: str) -> bool:
    """Whether it is Triton's `num_programs`: an update's table has a count of its own, of fixed blocks."""
    is_of_triton = isinstance(node, ast.ImportFrom) or (
        isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("tl", "triton.language")
    )
    return name == "num_programs" and is_of_triton
