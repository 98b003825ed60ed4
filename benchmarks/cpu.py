"""Measures training speed on CPUs: parallel3d, its peers and the machine's limit, in turn, in one session.

    python benchmarks/cpu.py --rounds 3 --steps 6 --out build/cpu.json

Every variant trains the same model on the same number of cores: one process with all of them, or two with half
each. Those of one layout, the plain loop and the machine's limit (peers/machine*.py) take a step each in turn
(benchmarks/turns.py), so that a change of the machine's speed affects all of them alike; ratios are those of steps of
the same turn. With `--apart` each runs all its steps alone, one variant after the other. `--baseline TREE` (`git
worktree add TREE COMMIT`) lets ours of another tree take turns with ours of this one. Nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contestants import (
    ELSEWHERE,
    PLAIN_TOKENS_PER_S_ELSEWHERE,
    VARIANTS,
    WARMUP_STEPS,
    Run,
    Variant,
    measure,
)
from benchmarks.peers.workload import Workload, add_workload, read_workload
from benchmarks.turns import take_turns
from parallel3d.monitor.environment import describe_environment

MAX_IDLE_LOAD = 0.3
PLAIN = "plain"


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds the stack, which ends the current run
    workload, variants = read_workload(options), select(options.only)
    if options.baseline:
        variants = [*variants, *of_tree(options.baseline.resolve(), variants)]
    if os.getloadavg()[0] > MAX_IDLE_LOAD:
        print(f"warning: other work is running (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    runs: list[Run] = []
    for index in range(options.rounds):
        for run in runs_of_round(variants, workload, index, options):
            print(f"round {index + 1}: {describe(run)}", file=sys.stderr, flush=True)
            runs.append(run)
            if options.out:
                write_json(options.out, workload, runs)
    print(report(workload, runs, variants))
    return int(any(run.error for run in runs))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed on CPUs: ours, peers and the machine's limit, in turn.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all variants")
    parser.add_argument("--steps", type=int, default=6, help=f"timed steps per run, after {WARMUP_STEPS} untimed ones")
    parser.add_argument("--apart", action="store_true", help="each variant's steps alone, not in turn with others'")
    parser.add_argument("--cores", type=int, default=2, help="total number of cores, even")
    parser.add_argument("--only", help="variants, by name or first word: ours,plain,'torch pp2'")
    parser.add_argument("--baseline", type=Path, metavar="TREE", help="root of another source tree to compare with")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for all runs and the environment")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="longest step, or with --apart longest run")
    names = ("policy", "hidden_size", "intermediate_size", "num_hidden_layers", "sequence_length")
    add_workload(parser, names)  # other sizes are fixed: layouts and ratios depend on them
    return parser.parse_args(arguments)


def select(only: str | None) -> list[Variant]:
    """The variants named, in their usual order."""
    if only is None:
        return list(VARIANTS)
    words = [word.strip() for word in only.split(",")]
    for word in words:
        if not any(word in (c.name, c.name.split()[0]) for c in VARIANTS):
            raise SystemExit(f"--only: no variant {word!r}; there are {', '.join(c.name for c in VARIANTS)}")
    return [c for c in VARIANTS if c.name in words or c.name.split()[0] in words]


def of_tree(tree: Path, variants: Sequence[Variant]) -> list[Variant]:
    """Ours among the variants, run from another source tree."""
    ours = [each for each in variants if each.module is None]
    return [replace(each, name=baseline_name(each.name), tree=tree, goal=None, bf16_goal=None) for each in ours]


def baseline_name(name: str) -> str:
    return name.replace("ours", "baseline")


def runs_of_round(
    variants: Sequence[Variant], workload: Workload, index: int, options: argparse.Namespace
) -> Iterator[Run]:
    """Runs every variant; the plain loop and a machine's limit once for each group that they are in."""
    if options.apart:
        yield from (measure(variant, workload, index, options) for variant in variants)
    else:
        for layout, group in groups_of(variants, workload).items():
            yield from take_turns(group, workload, options, round_index=index, beside=layout)


def groups_of(variants: Sequence[Variant], workload: Workload) -> dict[str, list[Variant]]:
    """Those that take turns, by layout: its variants, and what their speed is compared with."""
    compared = [each for each in variants if not is_base(each)] or variants
    return {
        layout: [each for each in variants if layout == each.layout or each.name in bases_of(layout, workload)]
        for layout in dict.fromkeys(each.layout for each in compared)
    }


def is_base(variant: Variant) -> bool:
    return variant.name.split()[0].startswith("machine") or variant.name == PLAIN


def bases_of(layout: str, workload: Workload) -> tuple[str, str]:
    return PLAIN, machine_of(layout, workload)[0]


# --- results ----------------------------------------------------------------------------------------------------------


def describe(run: Run) -> str:
    speed = run.error or f"{median(run.tokens_per_s):,.0f} tokens/s"
    return f"{run.name}: {speed} ({f'in turn, {run.beside}' if run.wall_s is None else f'{run.wall_s:.0f} s'})"


def write_json(path: Path, workload: Workload, runs: Sequence[Run]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {"environment": describe_environment(sys.orig_argv), "workload": asdict(workload)}
    path.write_text(json.dumps(parts | {"runs": [asdict(run) for run in runs]}, indent=1) + "\n")


def report(workload: Workload, runs: Sequence[Run], variants: Sequence[Variant] = VARIANTS) -> str:
    """Returns the tables in Markdown: one for each group of variants that took turns."""
    tables = []
    for beside in dict.fromkeys(run.beside for run in runs):
        of_group = [run for run in runs if run.beside == beside]
        names = {run.name for run in of_group}
        tables += [f"In turn, {beside}:"] if beside else []
        elsewhere = [peer for peer in ELSEWHERE if beside in ("", peer[1])]
        tables.append(speed_table([each for each in variants if each.name in names], workload, of_group, elsewhere))
        tables += baseline_lines(speeds_of(of_group))
    return "\n\n".join([f"`{shlex.join(sys.orig_argv)}`", *tables, kernel_table(runs)]).rstrip() + "\n"


def speed_table(
    variants: Sequence[Variant],
    workload: Workload,
    runs: Sequence[Run],
    elsewhere: Sequence[tuple[str, str, float, float]] = ELSEWHERE,
) -> str:
    """A row a variant: median and best of all its timed steps, beside the plain loop and the machine's bound."""
    speeds = {c.name: [] for c in variants} | speeds_of(runs)
    medians = {name: median(values) for name, values in speeds.items() if values}
    plain = medians.get(PLAIN)
    rows = [
        "| variant | tokens/s, median | best | of plain | of the machine's bound | last loss |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for variant in variants:
        name, turns = variant.name, [run for run in runs if run.name == variant.name]
        if errors := [run.error for run in turns if run.error]:
            rows.append(f"| {name} | {len(errors)} of {len(turns)} runs failed: {cell(errors[-1])} | | | | |")
        if name in medians:
            machine, part = machine_of(variant.layout, workload)
            of_plain = typical_ratio(speeds[name], speeds.get(PLAIN, []))
            of_bound = typical_ratio(speeds[name], [speed * part for speed in speeds.get(machine, [])])
            rows.append(
                f"| {name} | {medians[name]:,.0f} | {max(speeds[name]):,.0f} | {ratio(of_plain)} "
                f"| {share(of_bound, variant.goal_in(workload.policy))} | {loss_cell(turns)} |"
            )
    if plain is not None and workload.policy == "fp32" and elsewhere:
        rows += [estimate_row(*peer, plain=plain, medians=medians, workload=workload) for peer in elsewhere]
        rows += ["", "\\* not run here: estimated from its ratio to the plain loop on another machine (Intel)"]
    return "\n".join(rows)


def speeds_of(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Those of all steps, by variant."""
    names = dict.fromkeys(run.name for run in runs)
    return {name: [speed for run in runs if run.name == name for speed in run.tokens_per_s] for name in names}


def baseline_lines(speeds: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """How fast ours of this tree are beside those of the other one."""
    for name, values in speeds.items():
        base = baseline_name(name)
        if base != name and speeds.get(base):
            yield f"{name}: {ratio(typical_ratio(values, speeds[base]))} of {base}"


def typical_ratio(speeds: Sequence[float], bases: Sequence[float]) -> float | None:
    """The median over turns; of medians where one of both has failed in some."""
    if not speeds or not bases:
        return None
    if len(speeds) == len(bases):
        return median(speed / base for speed, base in zip(speeds, bases))
    return median(speeds) / median(bases)


def estimate_row(
    name: str, layout: str, low: float, high: float, *, plain: float, medians: Mapping[str, float], workload: Workload
) -> str:
    estimates = [value / PLAIN_TOKENS_PER_S_ELSEWHERE * plain for value in sorted({low, high})]
    speeds = " to ".join(f"{value:,.0f}" for value in estimates)
    bound = machine_bound(layout, medians, workload)
    shares = " to ".join(ratio(None if bound is None else value / bound) for value in estimates)
    return f"| {name} \\* | {speeds} | | {' to '.join(ratio(value / plain) for value in estimates)} | {shares} | |"


def machine_bound(layout: str, medians: Mapping[str, float], workload: Workload) -> float | None:
    """Tokens/s of the model's products and attention alone."""
    machine, part = machine_of(layout, workload)
    return None if machine not in medians else medians[machine] * part


def machine_of(layout: str, workload: Workload) -> tuple[str, float]:
    """The variant that is a layout's bound, and how much of it: a pipeline idles (p - 1) / (m + p - 1) of the time."""
    if layout != "pp2":
        return f"machine {layout}", 1.0
    bubble = 1 / (workload.num_micro_batches + 1)  # of two stages in order, 1F1B
    return "machine dp2", 1 - bubble


def share(of_bound: float | None, goal: float | None) -> str:
    if of_bound is None or goal is None:
        return ratio(of_bound)
    return f"{ratio(of_bound)} ({'at least' if of_bound >= goal else 'below'} {goal:.2f})"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def loss_cell(turns: Sequence[Run]) -> str:
    losses = [run.loss for run in turns if math.isfinite(run.loss)]
    return f"{losses[-1]:.2f}" if losses else ""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def kernel_table(runs: Sequence[Run]) -> str:
    """Returns the GFLOP/s of each kernel and implementation, with a column for each layout of the machine's runs."""
    last = {run.name: run.kernel_gflops for run in runs if run.kernel_gflops}
    if not last:
        return ""
    rows = [
        "| GFLOP/s of a process: torch.mm / ours / bf16 widened / the head cut / by tiles | " + " | ".join(last) + " |",
        "|---" + "|--:" * len(last) + "|",
    ]
    for kernel in next(iter(last.values())):
        cells = [" / ".join(f"{value:,.0f}" for value in table[kernel].values()) for table in last.values()]
        rows.append(f"| {kernel} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
