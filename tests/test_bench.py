"""What `make bench` concludes from figures; nothing is timed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench import RED, SIZES, Comparison, Ratios, compare, machine_key, ratios_of, report
from benchmarks.peers.workload import Workload
from parallel3d.monitor.environment import cpu_name, describe_cpu

WORKLOAD = Workload(**SIZES, policy="bf16")
SPEEDS = {"plain": 100.0, "machine single": 200.0, "machine dp2": 220.0, "ours single": 150.0, "ours pp2": 110.0}


def record(of_plain: float, of_bound: float) -> dict:
    ratios = {"ours single bf16": {"of_plain": of_plain, "of_bound": of_bound}}
    return {"date": "2026-11-22", "commit": "0123456789", "ratios": ratios}


def test_ratios_to_the_plain_loop_and_the_bound():
    """A pipeline's bound is two replicas' times (1 - bubble), 8 micro-batches on 2 stages: 8/9; tp2 did not run."""
    assert ratios_of(SPEEDS, WORKLOAD) == {
        "ours single bf16": Ratios(of_plain=1.5, of_bound=0.75),
        "ours pp2 bf16": Ratios(of_plain=1.1, of_bound=pytest.approx(110 / (220 * 8 / 9))),
    }
    assert ratios_of({k: v for k, v in SPEEDS.items() if k != "plain"}, WORKLOAD) == {}


@pytest.mark.parametrize(
    "of_plain, of_bound, is_slower",
    [
        (1.5, 0.75, False),
        (1.57, 0.785, False),  # 4.5 % each
        (1.6, 0.8, True),  # 6 % each
        (1.6, 0.75, False),  # the plain loop's turn was a good one
        (1.2, 0.6, False),  # faster now
    ],
)
def test_slower_is_where_both_ratios_fell(of_plain, of_bound, is_slower):
    now = ratios_of(SPEEDS, WORKLOAD)
    before = record(of_plain, of_bound)
    comparisons = compare(now, before)
    assert [each.is_regression for each in comparisons] == [is_slower, False], "pp2 is not in the record"
    text = report(comparisons, "a CPU", before, colour=True)
    assert (RED in text) == is_slower
    verdict = text.splitlines()[-1]
    assert ("slower than on 2026-11-22 (commit 0123456789): ours single bf16" in verdict) == is_slower
    assert ("SLOWER" in report(comparisons, "a CPU", before, colour=False)) == is_slower


def test_a_cpu_without_a_record_is_told_so():
    comparisons = compare(ratios_of(SPEEDS, WORKLOAD), None)
    assert not any(each.is_regression for each in comparisons)
    text = report(comparisons, "a CPU", None, colour=True)
    assert text.endswith("no record yet for a CPU; --record writes one") and RED not in text


def test_what_makes_machines_alike():
    environment = {"cpu_model": "A CPU", "num_cores": 2, "packages": {"torch": "2.13.0+cpu"}, "host": "here"}
    assert machine_key(environment) == "A CPU, 2 cores, torch 2.13.0+cpu"


def test_generations_of_one_name_are_different_machines():
    def key(family):
        cpu = cpu_name("AMD EPYC", family, "17")
        return machine_key({"cpu_model": cpu, "num_cores": 2, "packages": {"torch": "2.13.0+cpu"}})

    assert key("25") == "AMD EPYC (family 25, model 17), 2 cores, torch 2.13.0+cpu"
    assert len({key("25"), key("26"), key(None)}) == 3
    described, family, model = describe_cpu(), *(read_cpu_fact(field) for field in ("cpu family", "model"))
    assert family is None or described.endswith(f" (family {family}, model {model})")


def read_cpu_fact(field):
    """The value of `field` in /proc/cpuinfo; None where it has none."""
    info = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in info.read_text().splitlines()] if info.exists() else []
    return next((value.strip() for name, _, value in lines if name.strip() == field), None)


def test_a_change_is_the_better_one_of_both():
    comparison = Comparison(name="x", now=Ratios(of_plain=0.9, of_bound=0.5), before=Ratios(of_plain=1.0, of_bound=1.0))
    assert comparison.change == pytest.approx(-0.1)
