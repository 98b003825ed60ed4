"""The commands of this project that pages show in blocks of code, and how a test deals with one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "configs/README.md",
    "benchmarks/README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
SHELLS = ("", "bash", "sh", "shell", "console")
OURS = re.compile(r"(parallel3d|make|torchrun) \S|\.ci/run|(srun )?python (launch|benchmarks)/|python -m \w")
"""How a command of the project begins; what installs packages or sends signals is not one."""


def page_commands(text: str) -> Iterator[str]:
    """Yields the commands of a page: comments are left out, continued lines joined, blanks single."""
    command = ""
    for line in code_lines(text):
        if not command and not OURS.match(line):
            continue
        command += f" {line}"
        if line.endswith("\\"):
            command = command.removesuffix("\\")
            continue
        yield " ".join(re.sub(r"\s# .*$", "", command).split())
        command = ""


def code_lines(text: str) -> Iterator[str]:
    """Yields the lines of blocks that are fenced without a language, or as a shell's, or indented by four blanks."""
    fence: str | None = None
    is_indented, before = False, ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fence = line.strip().removeprefix("```") if fence is None else None
        elif fence is not None:
            if fence in SHELLS:
                yield line.strip()
        elif line.startswith("    ") and (is_indented or not before.strip()):
            is_indented = True
            yield line.strip()
        elif line.strip():
            is_indented = False
        before = line


@dataclass(frozen=True, kw_only=True)
class DocumentedCommand:
    """One command of a page."""

    text: str
    """As `page_commands` gives it."""
    reason: str = ""
    """Why no test runs it; empty: one does."""
    tested_by: str = ""
    """The test that runs the same thing in another form."""
    typed: str = ""
    added: str = ""
    given: Mapping[str, str] = field(default_factory=dict)
    said: str = ""
    """What it prints, among other things."""

    @property
    def line(self) -> str:
        """What is typed, without `&` and without what is added."""
        return (self.typed or self.text).removesuffix(" &")

    @property
    def is_ours(self) -> bool:
        """Whether it is a command of `parallel3d`, as such or as a script."""
        return self.line.startswith(("parallel3d ", "python launch/"))


def ran(text: str, said: str, *, typed: str = "", added: str = "", **given: str) -> DocumentedCommand:
    return DocumentedCommand(text=text, said=said, typed=typed, added=added, given=given)


def resolved(text: str, said: str = '"model": {', **given: str) -> DocumentedCommand:
    """A run that would take minutes, or that another test has: its configuration alone."""
    return DocumentedCommand(text=text, said=said, added="--print-config", given=given)


def not_run(text: str, reason: str, tested_by: str = "", *, typed: str = "") -> DocumentedCommand:
    return DocumentedCommand(text=text, reason=reason, tested_by=tested_by, typed=typed)
