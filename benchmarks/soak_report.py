"""What soak.py concludes from what it has seen, and its log."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Lines = Sequence[dict[str, Any]]
ROLES = ("stub", "coordinator", "guardian", "rank")
MORE_FILES, MORE_THREADS = 4, 2
MORE_MEMORY, MORE_MIB = 1.05, 10.0
"""A factor, and what may come on top: what a process may gain in the time of a soak."""
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

    pid: int
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


def judge(
    lines: Lines, undisturbed: Lines, samples: Sequence[Sample], *, is_whole: bool | None, codes: Sequence[int]
) -> Verdict:
    """Compares the run with the undisturbed one, and its end with its beginning. `is_whole` None: not known."""
    ours, theirs = losses(lines), losses(undisturbed)
    steps = [line["step"] for line in lines if "event" not in line]
    theirs = {step: loss for step, loss in theirs.items() if step in ours}
    differing = [step for step, loss in theirs.items() if ours[step] != loss]
    checks = {
        f"the replicas at the end: {samples[-1].widths}": is_whole is not False,
        f"exit codes {sorted(set(codes))} after Ctrl-C": set(codes) == {EXIT_BY_SIGINT},
        f"{len(steps)} steps, each recorded once": steps == list(range(1, len(steps) + 1)),
        f"{len(theirs) - len(differing)} of {len(theirs)} losses are bitwise those of the undisturbed process"
        + (f", the first that is not is of step {differing[0]}" if differing else ""): not differing,
        **check_growth(samples),
    }
    findings = [f"{'right' if is_right else 'WRONG'}: {text}" for text, is_right in checks.items()]
    return Verdict(findings=findings, is_right=all(checks.values()))


def check_growth(samples: Sequence[Sample]) -> dict[str, bool]:
    """Says by how much everything has grown, and whether that is within its bound."""
    return dict([*(check_role(samples, role) for role in ROLES), check_run_files(samples)])


def check_role(samples: Sequence[Sample], role: str) -> tuple[str, bool]:
    """The largest process of a role (the median over a third of the time), and the one that has lived longest."""
    before, after = (typical(part, role) for part in thirds(samples))
    young, old = longest_lived(samples, role)
    pairs = {"the largest": (before, after), "the oldest": (young, old)}
    texts = [
        f"{which} {start.num_files} -> {end.num_files} files, {start.num_threads} -> {end.num_threads} threads, "
        f"{start.resident_mib:.0f} -> {end.resident_mib:.0f} MiB"
        for which, (start, end) in pairs.items()
    ]
    return f"{role}: {'; '.join(texts)}", all(is_flat(start, end) for start, end in pairs.values())


def is_flat(before: Size, after: Size) -> bool:
    return (
        after.num_files <= before.num_files + MORE_FILES
        and after.num_threads <= before.num_threads + MORE_THREADS
        and after.resident_mib <= before.resident_mib * MORE_MEMORY + MORE_MIB
    )


def check_run_files(samples: Sequence[Sample]) -> tuple[str, bool]:
    """The median: one more checkpoint is there while it is being written."""
    before, after = (statistics.median_high(sample.num_run_files for sample in part) for part in thirds(samples))
    return f"files of the run, without logs (a checkpoint is one): {before} -> {after}", after <= before + MORE_FILES


def thirds(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """The first third of the time and the last."""
    third = max(1, len(samples) // 3)
    return samples[:third], samples[-third:]


def typical(samples: Sequence[Sample], role: str) -> Size:
    """The median over the samples of the largest of each."""
    of_role = [sizes for sample in samples if (sizes := sample.sizes.get(role))]
    if not of_role:
        return Size(pid=0, num_files=0, num_threads=0, resident_mib=0.0)
    return Size(
        pid=0,
        num_files=statistics.median_high(max(size.num_files for size in sizes) for sizes in of_role),
        num_threads=statistics.median_high(max(size.num_threads for size in sizes) for sizes in of_role),
        resident_mib=statistics.median(max(size.resident_mib for size in sizes) for sizes in of_role),
    )


def longest_lived(samples: Sequence[Sample], role: str) -> tuple[Size, Size]:
    """The process that is in most samples: its size after half of its life, and at its end. With its first changes of
    membership a worker's free blocks come to lie on more pages, while those in use stay as many; what leaks does not
    stop after half of a life."""
    lives: dict[int, list[Size]] = {}
    for size in (size for sample in samples for size in sample.sizes.get(role, ())):
        lives.setdefault(size.pid, []).append(size)
    life = max(lives.values(), key=len)
    return life[len(life) // 2], life[-1]


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
