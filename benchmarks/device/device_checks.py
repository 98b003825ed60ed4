"""Correctness on a device, by the project's own tests: those marked `gpu`, with the CPU as oracle, and the kernels'."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.device.part_process import Part

ROOT = Path(__file__).resolve().parents[2]
NONE_SELECTED = 5
"""pytest's exit code."""


def run_tests(part: Part) -> None:
    """The tests that need a GPU, whole runs of processes last."""
    files = [str(path.relative_to(ROOT)) for path in gpu_test_files()]
    run_pytest(part, ["-m", "gpu", *files])


def run_kernel_tests(part: Part) -> None:
    """The tests of Triton's kernels, which run on a GPU where there is one; else one file, in the interpreter."""
    run_pytest(part, ["--tier", "quick", "tests/kernels" if part.device.type == "cuda" else SMALLEST_KERNEL_TEST])


SMALLEST_KERNEL_TEST = "tests/kernels/test_triton_random.py"


def run_pytest(part: Part, arguments: Sequence[str]) -> None:
    """Writes a line for each test that was not skipped; raises RuntimeError if one fails."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        done = subprocess.run(command, cwd=ROOT)
        counts: Counter[str] = Counter()
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            outcome = outcome_of(case)
            counts[outcome] += 1
            if outcome != "skipped":
                part.write(test=case.get("name"), outcome=outcome, seconds=float(case.get("time", 0)), why=why(case))
    part.write(counts=counts)
    if done.returncode not in (0, NONE_SELECTED):
        raise RuntimeError(f"pytest ended with {done.returncode}: {counts}")


def gpu_test_files() -> list[Path]:
    """The files with such tests, but for the kernels'; whole runs of processes last."""
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if "kernels" not in path.parts]
    found = [path for path in paths if "mark.gpu" in path.read_text()]
    return sorted(found, key=lambda path: ("launch" in path.parts, path))


def outcome_of(case: ElementTree.Element) -> str:
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def why(case: ElementTree.Element) -> str:
    """The first line of a failure's message."""
    messages = [child.get("message", "") for child in case if child.tag in ("failure", "error")]
    return messages[0].splitlines()[0] if messages and messages[0] else ""
