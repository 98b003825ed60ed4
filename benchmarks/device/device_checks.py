"""Correctness on a device: the tests marked `gpu`, each with the CPU as its oracle, and one line for each."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.device.part_process import Part

ROOT = Path(__file__).resolve().parents[2]


def run_tests(part: Part) -> None:
    """Runs them, the fast ones first; raises RuntimeError if one fails."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        files = [str(path.relative_to(ROOT)) for path in gpu_test_files()]
        done = subprocess.run([*command, *files], cwd=ROOT)
        counts: dict[str, int] = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            outcome = outcome_of(case)
            counts[outcome] = counts.get(outcome, 0) + 1
            if outcome != "skipped":
                part.write(test=case.get("name"), outcome=outcome, seconds=float(case.get("time", 0)), why=why(case))
    part.write(counts=counts)
    if done.returncode not in (0, 5):  # 5: none was selected
        raise RuntimeError(f"pytest ended with {done.returncode}: {counts}")


def gpu_test_files() -> list[Path]:
    """The files with such tests; whole runs of processes last."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    return sorted(found, key=lambda path: ("launch" in path.parts, path))


def outcome_of(case: ElementTree.Element) -> str:
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def why(case: ElementTree.Element) -> str:
    """The first line of a failure's message."""
    messages = [child.get("message", "") for child in case if child.tag in ("failure", "error")]
    return messages[0].splitlines()[0] if messages and messages[0] else ""
