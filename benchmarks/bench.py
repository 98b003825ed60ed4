"""Did this tree become slower? Ratios of our speed to the plain loop's and to the machine's bound, beside a record.

    make bench                                        # two to three minutes on an EPYC, nothing else running
    python benchmarks/bench.py --rounds 3 --record    # writes this CPU's figures into benchmarks/records.json

trains a model of the quickstart's size in every layout, in fp32 and bf16, in turn with a plain torch loop and with the
machine's products and attention alone (benchmarks/cpu.py), and compares the ratios with those of the last record on the
same processor (name, family and model), number of cores and version of torch. Times differ from day to day, ratios
hardly: a layout counts as slower where both of its ratios fell by more than 5 %, which a noisy turn of the plain loop
alone does not cause.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contestants import VARIANTS, Run, Variant, measure
from benchmarks.cpu import MAX_IDLE_LOAD, describe, machine_bound
from benchmarks.peers.workload import Workload
from parallel3d.monitor.environment import describe_environment

RECORDS = ROOT / "benchmarks" / "records.json"
MAX_LOSS = 0.05
RED, RESET = "\033[31m", "\033[0m"
SIZES: Mapping[str, int] = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "sequence_length": 128,
    "micro_batch_size": 4,
    "global_batch_size": 32,
}
"""The quickstart's model, with batches of which two replicas get four micro-batches each."""
POLICIES = ("fp32", "bf16")
CONTESTANTS = tuple(v for v in VARIANTS if v.name.split()[0] in ("machine", "plain", "ours"))
PLAIN_LOOP = next(v for v in CONTESTANTS if v.name == "plain")

Speeds = Mapping[str, float]
"""Tokens per second by variant."""


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """One of our layouts in one format."""

    of_plain: float
    of_bound: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A layout's ratios now and in the record; None where the record lacks it."""

    name: str
    now: Ratios
    before: Ratios | None

    @property
    def change(self) -> float:
        """The better one of both ratios' changes: -0.06 where both fell by at least 6 %."""
        if self.before is None:
            return 0.0
        return max(self.now.of_plain / self.before.of_plain, self.now.of_bound / self.before.of_bound) - 1

    @property
    def is_regression(self) -> bool:
        return self.change < -MAX_LOSS


# --- decisions --------------------------------------------------------------------------------------------------------


def ratios_of(speeds: Speeds, workload: Workload, variants: Sequence[Variant] = CONTESTANTS) -> dict[str, Ratios]:
    """Ratios of all our layouts that ran, by name with the format."""
    found = {}
    for variant in variants:
        bound = machine_bound(variant.layout, speeds, workload)
        if variant.module is None and variant.name in speeds and "plain" in speeds and bound is not None:
            speed = speeds[variant.name]
            ratios = Ratios(of_plain=speed / speeds["plain"], of_bound=speed / bound)
            found[f"{variant.name} {workload.policy}"] = ratios
    return found


def compare(now: Mapping[str, Ratios], record: Mapping[str, Any] | None) -> list[Comparison]:
    """Each layout beside the record's entry for it."""
    before = {} if record is None else {name: Ratios(**values) for name, values in record["ratios"].items()}
    return [Comparison(name=name, now=ratios, before=before.get(name)) for name, ratios in now.items()]


def machine_key(environment: Mapping[str, Any]) -> str:
    """What must be equal for ratios to be comparable."""
    return f"{environment['cpu_model']}, {environment['num_cores']} cores, torch {environment['packages']['torch']}"


def report(comparisons: Sequence[Comparison], key: str, record: Mapping[str, Any] | None, *, colour: bool) -> str:
    """A table, and a verdict in the last line."""
    lines = [f"{'':20}{'of plain':>10}{'recorded':>10}{'of bound':>10}{'recorded':>10}{'change':>9}"]
    for each in comparisons:
        before = [f"{each.before.of_plain:.2f}", f"{each.before.of_bound:.2f}"] if each.before else ["-", "-"]
        change = f"{100 * each.change:+.0f} %" if each.before else "-"
        figures = [f"{each.now.of_plain:.2f}", before[0], f"{each.now.of_bound:.2f}", before[1]]
        line = f"{each.name:20}" + "".join(f"{figure:>10}" for figure in figures) + f"{change:>9}"
        lines.append(_red(line, colour) if each.is_regression else line)
    if record is None:
        verdict = f"no record yet for {key}; --record writes one"
    elif slower := [each.name for each in comparisons if each.is_regression]:
        verdict = _red(f"slower than on {record['date']} (commit {record['commit']}): {', '.join(slower)}", colour)
    else:
        verdict = f"no layout is more than {100 * MAX_LOSS:.0f} % slower than on {record['date']}"
    return "\n".join([*lines, "", verdict])


def _red(text: str, colour: bool) -> str:
    return f"{RED}{text}{RESET}" if colour else f"{text}  <- SLOWER"


# --- actions ----------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    if os.getloadavg()[0] > MAX_IDLE_LOAD:  # two threads of a process that must share a core wait for each other
        print(f"warning: other work is running (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    runs = {policy: measure_all(Workload(**SIZES, policy=policy), options) for policy in POLICIES}
    now: dict[str, Ratios] = {}
    for policy, of_policy in runs.items():
        speeds = {run.name: [s for r in of_policy if r.name == run.name for s in r.tokens_per_s] for run in of_policy}
        medians = {name: median(values) for name, values in speeds.items() if values}
        now |= ratios_of(medians, Workload(**SIZES, policy=policy))
    environment = describe_environment(sys.orig_argv)
    key = machine_key(environment)
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    comparisons = compare(now, records.get(key))
    print(report(comparisons, key, records.get(key), colour=sys.stdout.isatty()))
    if options.record:
        records[key] = {
            "date": environment["started_at"][:10],
            "commit": (environment["git_commit"] or "unknown")[:10],
            "ratios": {name: {k: round(v, 3) for k, v in asdict(ratios).items()} for name, ratios in now.items()},
        }
        RECORDS.write_text(json.dumps(records, indent=1) + "\n")
        print(f"recorded in {RECORDS.relative_to(ROOT)}")
    has_failed = any(run.error for of_policy in runs.values() for run in of_policy)
    return int(has_failed or (options.strict and any(each.is_regression for each in comparisons)))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares our speed with the last record on this kind of CPU.")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=8, help="timed steps a turn")
    parser.add_argument("--record", action="store_true", help="write the ratios as this CPU's record")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a layout became slower")
    parser.set_defaults(cores=2, timeout_s=120.0)
    return parser.parse_args(arguments)


def measure_all(workload: Workload, options: argparse.Namespace) -> list[Run]:
    """All contestants in turn, round after round."""
    runs: list[Run] = []
    for number in range(options.rounds):
        for variant in (*CONTESTANTS, PLAIN_LOOP):  # the base of all ratios before and after ours
            runs.append(measure(variant, workload, number, options))
            print(f"{workload.policy}, round {number + 1}: {describe(runs[-1])}", file=sys.stderr, flush=True)
    return runs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
