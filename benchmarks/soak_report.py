"""What soak.py concludes from what it has seen, and its log."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Lines = Sequence[dict[str, Any]]
GROWTH_MIB = 40.0
"""Of the largest process of a role, from the first third of the time to the last."""
EXIT_BY_SIGINT = 130


@dataclass(frozen=True, kw_only=True)
class Event:
    """A strike."""

    at_s: float
    what: str
    step: int


@dataclass(frozen=True, kw_only=True)
class Size:
    """Resources of one process."""

    num_files: int
    num_threads: int
    resident_mib: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All processes of the run at one moment."""

    step: int
    sizes: dict[str, list[Size]]
    """By role."""
    num_run_files: int
    """Files and folders of the run, without logs."""
    widths: tuple[int, ...]
    """The replicas of each stage."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    findings: list[str]
    is_right: bool


def judge(lines: Lines, undisturbed: Lines, samples: Sequence[Sample], *, is_whole: bool, code: int) -> Verdict:
    """Compares the run with the undisturbed one, and its end with its beginning."""
    ours, theirs = losses(lines), losses(undisturbed)
    steps = [line["step"] for line in lines if "event" not in line]
    theirs = {step: loss for step, loss in theirs.items() if step in ours}
    differing = [step for step, loss in theirs.items() if ours[step] != loss]
    grown = [text for role in ROLES if (text := growth(samples, role))]
    checks = {
        f"every place is taken at the end: {samples[-1].widths}": is_whole,
        f"exit code {code} after Ctrl-C": code == EXIT_BY_SIGINT,
        f"{len(steps)} steps, each recorded once": steps == list(range(1, len(steps) + 1)),
        f"{len(theirs) - len(differing)} of {len(theirs)} losses are bitwise those of the undisturbed process"
        + (f", the first that is not is of step {differing[0]}" if differing else ""): not differing,
        "; ".join(grown) or "no process has grown": not grown,
    }
    findings = [f"{'right' if is_right else 'WRONG'}: {text}" for text, is_right in checks.items()]
    return Verdict(findings=findings, is_right=all(checks.values()))


ROLES = ("stub", "coordinator", "guardian", "rank")


def thirds(samples: Sequence[Sample], role: str) -> tuple[list[Size], list[Size]]:
    """Sizes of the processes of a role in the first third of the time and in the last."""
    third = max(1, len(samples) // 3)
    return tuple(  # type: ignore[return-value]
        [size for sample in part for size in sample.sizes.get(role, ())] for part in (samples[:third], samples[-third:])
    )


def largest(sizes: Sequence[Size]) -> Size:
    return Size(
        num_files=max((size.num_files for size in sizes), default=0),
        num_threads=max((size.num_threads for size in sizes), default=0),
        resident_mib=max((size.resident_mib for size in sizes), default=0.0),
    )


def growth(samples: Sequence[Sample], role: str) -> str:
    """Says what has grown in the processes of a role; "" if nothing has."""
    before, after = (largest(sizes) for sizes in thirds(samples, role))
    figures = {
        f"{after.num_files} open files ({before.num_files})": after.num_files > before.num_files + 4,
        f"{after.num_threads} threads ({before.num_threads})": after.num_threads > before.num_threads + 2,
        f"{after.resident_mib:.0f} MiB ({before.resident_mib:.0f})": after.resident_mib
        > before.resident_mib + GROWTH_MIB,
    }
    grown = [text for text, is_so in figures.items() if is_so]
    return f"{role}: {', '.join(grown)}" if grown else ""


def losses(lines: Lines) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines if "event" not in line}


def write_report(
    lines: Lines, events: Sequence[Event], samples: Sequence[Sample], verdict: Verdict, options: argparse.Namespace
) -> str:
    """Returns the log in Markdown."""
    changes = [line for line in lines if line.get("event") == "membership"]
    joined = sum(len(change["joined"]) for change in changes)
    counts = Counter(event.what.rpartition(" rank ")[0] or event.what for event in events)
    whole = sum(len(set(sample.widths)) == 1 and max(sample.widths) == 3 for sample in samples)
    return "\n".join(
        [
            f"{options.minutes:g} minutes, a strike every {options.every:g} s or so, seed {options.seed}.",
            "",
            *(f"- {finding}" for finding in verdict.findings),
            f"- {len(events)} strikes: {', '.join(f'{count} x {what}' for what, count in sorted(counts.items()))}",
            f"- {len(changes)} changes of membership; {joined} workers joined, in "
            f"{sum(bool(change['joined']) for change in changes)} of them",
            f"- every place was taken in {whole} of {len(samples)} samples",
            "",
            *pause_table(changes),
            "",
            *size_table(samples),
            "",
            "| s | step | strike |",
            "|--:|--:|---|",
            *(f"| {event.at_s:.0f} | {event.step} | {event.what} |" for event in events),
            "",
        ]
    )


def pause_table(changes: Lines) -> list[str]:
    """Seconds in which nothing was trained, by kind of change."""
    kinds = {
        "a loss": [change for change in changes if change["who"] and not change["joined"]],
        "a join": [change for change in changes if change["joined"] and not change["who"]],
        "both": [change for change in changes if change["joined"] and change["who"]],
    }
    rows = ["| change | number | pause: median | worst |", "|---|--:|--:|--:|"]
    for kind, of_kind in kinds.items():
        if pauses := [pause(change) for change in of_kind]:
            rows.append(f"| {kind} | {len(pauses)} | {statistics.median(pauses):.2f} s | {max(pauses):.2f} s |")
    return rows


def pause(change: dict[str, Any]) -> float:
    return sum(change[part] or 0.0 for part in ("detect_s", "agree_s", "repair_s", "regroup_s"))


def size_table(samples: Sequence[Sample]) -> list[str]:
    """The largest process of each role, in the first third of the time and in the last."""
    rows = ["| largest | open files | threads | MiB |", "|---|--:|--:|--:|"]
    for role in ROLES:
        before, after = (largest(sizes) for sizes in thirds(samples, role))
        rows.append(
            f"| {role} | {before.num_files} -> {after.num_files} | {before.num_threads} -> {after.num_threads} | "
            f"{before.resident_mib:.0f} -> {after.resident_mib:.0f} |"
        )
    rows.append(f"| run folder, without logs | {samples[0].num_run_files} -> {samples[-1].num_run_files} | | |")
    return rows
