"""Finds wording that the project avoids: words of a private dialect, and sentences translated word by word.

`python -m tests.support.english [FOLDER ...]` lists the findings; tests/test_architecture.py allows none.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("parallel3d", "launch", "benchmarks", "docs", "README.md")
UNWANTED = re.compile(
    r"\b(?:is|are|was|were) no (?!longer|more|less|fewer|later|earlier)"  # "is not a"
    r"|\b(?:told|tells?|whoever|nobody|somebody|everybody|likewise|anew|shall)\b"  # logs, reports; whatever, none; ...
    r"|\bfor a person\b|\bso many\b|\bas ever\b|\bof which \w+ there\b|\bof which there\b"
    r"|\b(?:seats?|pinboards?|heirs?|switchboards?|musters?|roster|bereaved|membership epochs?)\b",
    re.IGNORECASE,
)
UNWANTED_START = re.compile(r"(?:What (?:a|an|the|it|all|is|are|was)|Of (?:the|a|an|all|each)|The same of)\b")
"""Docstrings that are a noun clause or a fragment."""


def unwanted_in_python(source: str) -> Iterator[tuple[int, str]]:
    """(line, wording) in comments, docstrings and other text of a Python file; names are not read."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            for match in UNWANTED.finditer(token.string):
                yield token.start[0] + token.string[: match.start()].count("\n"), match[0]
    for node in ast.walk(ast.parse(source)):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_docstring and (match := UNWANTED_START.match(ast.get_docstring(node) or "")):
            yield node.body[0].lineno, f"{match[0]} ..."


def unwanted_in_markdown(text: str) -> Iterator[tuple[int, str]]:
    """(line, wording) outside of code blocks."""
    prose = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    for match in UNWANTED.finditer(prose):
        yield prose[: match.start()].count("\n") + 1, match[0]


def findings(folder: str) -> list[str]:
    """Unwanted wording below a folder of the repository, or in one file: "path:line: wording"."""
    top = ROOT / folder
    found = []
    for path in [top] if top.is_file() else sorted(top.rglob("*")):
        if path.suffix in (".py", ".md") and "logs" not in path.parts:  # docs/logs is what programs wrote
            read = unwanted_in_python if path.suffix == ".py" else unwanted_in_markdown
            found += [f"{path.relative_to(ROOT)}:{line}: {wording}" for line, wording in sorted(read(path.read_text()))]
    return found


if __name__ == "__main__":
    for folder in sys.argv[1:] or FOLDERS:
        lines = findings(folder)
        print("\n".join([*lines, f"{folder}: {len(lines)}"]))
