"""Compares the dumps of two runs tensor by tensor: `python launch/compare_dumps.py A B [--tolerance 1e-5]`.

A and B are folders that `debug.dump_tensors` has written, or single steps in them; the layouts may differ. Prints for
each step what differs, in the order of computation: the first line names the cause. Exit codes: 0 equal within the
tolerance, 1 different, 2 invalid arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from parallel3d.commands.parsers import parse
from parallel3d.debug.compare_dumps import SECTIONS, TensorComparison, compare_tensors, dumped_tensors, mean_loss
from parallel3d.debug.dump import read_step
from parallel3d.errors import UserError


def main(arguments: list[str]) -> int:
    options = parse("compare-dumps", arguments)
    try:
        ours, theirs = steps_in(options.ours), steps_in(options.theirs)
        steps = common_steps(ours, theirs, options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    equal = [compare_step(step, ours[step], theirs[step], options) for step in steps]
    return 0 if all(equal) else 1


def steps_in(folder: Path) -> dict[int, Path]:
    """The dumped steps in a folder, or the one that it is. Raises UserError when there are none."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a directory: give the dumps of a run, RUN/dumps, or a step in them")
    found = [folder] if folder.name.startswith("step-") else list(folder.glob("step-*"))
    steps = {int(path.name.removeprefix("step-")): path for path in found if path.is_dir()}
    if not steps:
        raise UserError(f"{folder} holds no step-N folder: give the dumps of a run that set debug.dump_tensors")
    return steps


def common_steps(ours: dict[int, Path], theirs: dict[int, Path], options: argparse.Namespace) -> list[int]:
    """The steps that both have. Raises UserError when there are none."""
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        raise UserError(f"no step in both: {sorted(ours)} in {options.ours}, {sorted(theirs)} in {options.theirs}")
    return steps


def compare_step(step: int, ours: Path, theirs: Path, options: argparse.Namespace) -> bool:
    """Prints the differences of one step; returns True when there are none."""
    dumps = read_step(ours), read_step(theirs)
    tensors = dumped_tensors(dumps[0]), dumped_tensors(dumps[1])
    found = list(compare_tensors(*tensors))
    print(
        f"step {step}: {len(found)} tensors in both dumps; loss {' and '.join(map(format_loss, map(mean_loss, dumps)))}"
    )
    for names, folder in (
        (tensors[0].keys() - tensors[1].keys(), ours),
        (tensors[1].keys() - tensors[0].keys(), theirs),
    ):
        if names:
            more = " ..." if len(names) > options.rows else ""
            print(f"  only in {folder}: {', '.join(sorted(names)[: options.rows])}{more}")
    for section in SECTIONS:
        of_section = [each for each in found if each.section == section]
        print_section(section, of_section, options, sequence_length=dumps[0][0].sequence_length)
    different = [each for each in found if not each.is_same(options.tolerance)]
    if different:
        print(f"  the first in the order of computation: {different[0].name}")
    return bool(found) and not different


def print_section(
    section: str, found: Sequence[TensorComparison], options: argparse.Namespace, *, sequence_length: int
) -> None:
    """Prints one line for the section and one for each tensor that differs."""
    if not found:
        return
    different = [each for each in found if not each.is_same(options.tolerance)]
    largest = max(found, key=lambda each: each.relative)
    print(
        f"  {section}: {len(different)} of {len(found)} differ; the largest is {largest.name} ({largest.relative:.1e})"
    )
    width = max((len(each.name) for each in different), default=0)
    for each in different[: options.rows]:
        notes = [f"at {format_position(each, sequence_length)}"] if each.where else []
        if each.copy_difference > options.tolerance:
            notes.append(f"copies within a dump differ by {each.copy_difference:.1e}")
        if not each.complete:
            notes.append("parts are missing")
        print(f"    {each.name:<{width}}  {each.largest:.3e}  relative {each.relative:.1e}  {'; '.join(notes)}")
    if len(different) > options.rows:
        print(f"    ... and {len(different) - options.rows} more")


def format_position(comparison: TensorComparison, sequence_length: int) -> str:
    """Where the largest difference is: [row, column] of a parameter; slot, position and feature of an activation."""
    row, column = comparison.where or (0, 0)
    if comparison.section in ("weights", "gradients"):
        return f"[{row}, {column}]"
    return f"slot {row // sequence_length} position {row % sequence_length} feature {column}"


def format_loss(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.9f}"


if __name__ == "__main__":
    torch.set_num_threads(1)  # many small operations: OpenMP's idle threads would spin, for 5 times the CPU time
    sys.exit(main(sys.argv[1:]))
