"""The imports of a source file, and the place of a module in the tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath


def module_of(path: str) -> str:
    """parallel3d/parallel/abort.py -> parallel3d.parallel.abort; a package's __init__ is the package."""
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def folder_of(module: str) -> str:
    """The part whose files may import each other: a package under parallel3d."""
    return ".".join(module.split(".")[:2])


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in the file; `from a import b` counts as a.b."""
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def type_checking_lines(source: str) -> set[int]:
    """Lines in blocks `if TYPE_CHECKING:`, which only a type checker reads."""
    blocks = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If))
    types = (node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    return {line for node in types for part in node.body for line in range(part.lineno, (part.end_lineno or 0) + 1)}


def project_imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    for line, imported in imports(path, source):
        if is_in(imported, ("parallel3d",)):
            yield line, imported
