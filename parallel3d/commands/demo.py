"""The demo: `make demo` trains undisturbed, then again while workers are killed, and compares the losses.

Both are real runs of configs/demo.json: the first without its injected faults, the second with them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from parallel3d.child_process import command_line
from parallel3d.commands.parsers import parse
from parallel3d.monitor.run_folder import METRICS, read_metrics

CONFIG = "demo"
FOLDER = Path("runs/demo")
NUM_ROWS = 8


def main(arguments: list[str]) -> int:
    parse("demo", arguments)
    for title, folder, overrides in (
        ("First, undisturbed.", FOLDER / "undisturbed", ["elastic.faults=[]", "run.show_routes=false"]),
        (
            "Now again, while workers are killed, and come back: one in step 50, the leader in step 90.",
            FOLDER / "killed",
            [],
        ),
    ):
        print(f"\n{title}\n", flush=True)
        command = command_line("train", "--config", CONFIG)
        exit_code = subprocess.run([*command, f"run.directory={folder}", *overrides], check=False).returncode
        if exit_code:
            return exit_code
    print(compare(FOLDER / "undisturbed", FOLDER / "killed"))
    return 0


def compare(undisturbed: Path, killed: Path) -> str:
    """Returns a table of the losses of two runs, and their largest difference."""
    ours, theirs = losses(killed), losses(undisturbed)
    every = max(1, len(theirs) // NUM_ROWS)
    rows = [f"  {step:>4}   {theirs[step]:>11.6f}   {ours[step]:>11.6f}" for step in sorted(theirs)[every - 1 :: every]]
    farthest = max(abs(ours[step] - theirs[step]) for step in theirs)
    num_twice = sum("num_attempts" in line for line in read_metrics(killed / METRICS))
    chart = killed / "loss.png"
    return "\n".join(
        [
            "\n  step   undisturbed   with losses",
            *rows,
            f"\n{len(ours)} of {len(theirs)} steps, none skipped, {num_twice} begun twice;"
            f" the losses differ by at most {farthest:.1e}",
            "(fewer workers sum in a different order: precision.sums=exact makes the losses bitwise equal)",
            f"chart: {chart}",
        ]
    )


def losses(folder: Path) -> dict[int, float]:
    lines = [line for line in read_metrics(folder / METRICS) if "event" not in line]
    assert len({line["step"] for line in lines}) == len(lines), f"{folder}: a step is recorded twice"
    return {int(line["step"]): float(line["loss"]) for line in lines}
