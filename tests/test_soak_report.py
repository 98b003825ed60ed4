"""What a soak concludes of the sizes of its processes: growth without end is found, what settles is not blamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.soak_report import Sample, Size, check_growth, judge

MINUTES, PER_MINUTE = 30, 12
Curve = Callable[[float], float]


def flat(minute: float) -> float:
    return 0.0


def samples(
    memory: Curve = flat,
    files: Curve = flat,
    threads: Curve = flat,
    run_files: Curve = flat,
    young: Curve = flat,
) -> list[Sample]:
    """Six workers, of which the first lives as long as the run; `memory` and so on: what they gain, by their age.
    `young`: the memory of the others alone, by the time."""
    found = []
    for number in range(MINUTES * PER_MINUTE):
        minute = number / PER_MINUTE
        sizes = [
            Size(
                pid=pid,
                num_files=24 + round(files(age)),
                num_threads=12 + round(threads(age)),
                resident_mib=290.0 + memory(age) + (young(minute) if pid > 1 else 0.0),
            )
            for pid, age in [(1, minute), *((2 + slot + 10 * round(minute // 5), minute % 5) for slot in range(5))]
        ]
        roles = {role: [sizes[0]] for role in ("stub", "coordinator", "guardian")} | {"rank": sizes}
        found.append(Sample(step=number, sizes=roles, num_run_files=30 + round(run_files(minute)), widths=(3, 3)))
    return found


def settling(minute: float) -> float:
    """As workers do, if not as slowly: most within the first changes of membership."""
    return min(minute, 10.0) * 4.0 + 0.1 * minute


@pytest.mark.parametrize(
    ("curves", "wrong"),
    [
        ({}, []),
        (dict(memory=settling), []),
        (dict(memory=lambda minute: 2.0 * minute), ["stub", "coordinator", "guardian", "rank"]),
        (
            dict(memory=lambda minute: 2.0 * minute, young=lambda minute: 200.0),
            ["stub", "coordinator", "guardian", "rank"],
        ),
        (dict(young=lambda minute: 2.0 * minute), ["rank"]),
        (dict(files=lambda minute: minute / 3), ["stub", "coordinator", "guardian", "rank"]),
        (dict(threads=lambda minute: minute / 6), ["stub", "coordinator", "guardian", "rank"]),
        (dict(run_files=lambda minute: minute / 3), ["files of the run, without logs (a checkpoint is one)"]),
    ],
)
def test_what_grows_without_end_is_found(curves: dict[str, Curve], wrong: list[str]):
    growth = check_growth(samples(**curves))
    assert [text.partition(":")[0] for text, is_right in growth.items() if not is_right] == wrong


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        (dict(is_whole=False), ["the replicas at the end"]),
        (dict(codes=[130, 1]), ["exit codes [1, 130] after Ctrl-C"]),
        (dict(lines=[1, 2, 4]), ["3 steps, each recorded once"]),
        (dict(lines=[1, 2, 2, 3]), ["4 steps, each recorded once"]),
        (dict(undisturbed={2: 0.25}), ["2 of 3 losses are bitwise those of the undisturbed process"]),
    ],
)
def test_what_else_is_judged(changes: dict, wrong: list[str]):
    steps = changes.pop("lines", [1, 2, 3])
    other = changes.pop("undisturbed", {})
    lines = [{"step": step, "loss": 1 / step} for step in steps]
    undisturbed = [{"step": step, "loss": other.get(step, 1 / step)} for step in (1, 2, 3)]
    given = dict(is_whole=True, codes=[130, 130]) | changes
    verdict = judge(lines, undisturbed, samples(), **given)
    found = [text.removeprefix("WRONG: ") for text in verdict.findings if text.startswith("WRONG")]
    assert verdict.is_right == (not wrong) and len(found) == len(wrong)
    assert all(text.startswith(start) for text, start in zip(found, wrong)), found
