"""Correctness on a device, by the project's own tests: those marked `gpu`, with the CPU as oracle, and the kernels'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.device.part_process import Part

ROOT = Path(__file__).resolve().parents[2]
TEXT_CHARACTERS = 1500


def run_tests(part: Part) -> None:
    """The tests that need a GPU, whole runs of processes last."""
    files = [str(path.relative_to(ROOT)) for path in gpu_test_files()]
    run_pytest(part, ["-m", "gpu", *files])


def run_kernel_tests(part: Part) -> None:
    """The tests of Triton's kernels, which run on a GPU where there is one; else one file, in the interpreter."""
    run_pytest(part, ["--tier", "quick", "tests/kernels" if part.device.type == "cuda" else SMALLEST_KERNEL_TEST])


SMALLEST_KERNEL_TEST = "tests/kernels/test_triton_random.py"


class LinePlugin:
    """A plugin of pytest: a line when a test begins, so that one that hangs is named, and one with how it ended."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._part.write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return  # of the three phases only the test itself counts, unless another one fails or skips it
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        self.counts[outcome] += 1
        if outcome != "skipped":
            seconds = round(report.duration, 2)
            self._part.write(test=report.nodeid, outcome=outcome, seconds=seconds, why=why(report))


def run_pytest(part: Part, arguments: Sequence[str]) -> None:
    """Runs the tests in this process, and writes a line for each as it begins and ends; RuntimeError if one fails."""
    lines = LinePlugin(part)
    code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[lines])
    part.write(counts=lines.counts)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {int(code)}: {dict(lines.counts)}")


def gpu_test_files() -> list[Path]:
    """The files with such tests, but for the kernels'; whole runs of processes last."""
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if "kernels" not in path.parts]
    found = [path for path in paths if "mark.gpu" in path.read_text()]
    return sorted(found, key=lambda path: ("launch" in path.parts, path))


def why(report: pytest.TestReport) -> str:
    """The end of a failure's text: the values that were compared, the error and where it was raised."""
    return report.longreprtext.strip()[-TEXT_CHARACTERS:] if report.failed else ""
