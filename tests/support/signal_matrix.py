"""The whole signal matrix: FOLDER [NAME ...]. Cells that FOLDER has right results of aren't run again.

Some hours on two cores, so the tests run rows of it (test_signal_matrix.py, test_signal_matrix_of_training.py). Writes
docs/logs/signal_matrix.md once all have run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tests.support.launch_runs import metrics
from tests.support.signal_cells import SignalCell, all_signal_cells, run_signal_cell
from tests.support.training_cells import (
    UNDISTURBED,
    TrainingCell,
    all_training_cells,
    run_training_cell,
    start_training,
)

LOG = Path(__file__).parents[2] / "docs" / "logs" / "signal_matrix.md"
AT_ONCE = 2 * (os.cpu_count() or 1)
"""Runs at the same time: they mostly wait."""
TEXT_BYTES = 10**6
Cell = SignalCell | TrainingCell


def all_cells() -> list[Cell]:
    return [*all_signal_cells(), *all_training_cells()]


def main(folder: Path, wanted: list[str]) -> int:
    """Returns the number of cells that are wrong, or have not been run."""
    folder.mkdir(parents=True, exist_ok=True)
    results, cells, lock = folder / "results.jsonl", all_cells(), threading.Lock()
    seen, run_cell = _read(results), _runner(folder)

    def run(cell: Cell) -> None:
        times = sum(path.name.startswith(f"{cell.name}.") for path in folder.iterdir())
        wrong = run_cell(cell, folder / f"{cell.name}.{times}")
        with lock, results.open("a") as file:
            file.write(json.dumps({"cell": cell.name, "wrong": wrong}) + "\n")
        print(f"{cell.name}: {wrong or 'right'}", flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run, (c for c in cells if c.name in wanted or (not wanted and seen.get(c.name) != ""))))
    seen = _read(results)
    if not wanted:
        LOG.write_text(_table(cells, seen))
    return sum(seen.get(cell.name) != "" for cell in cells)


def _runner(folder: Path) -> Callable[[Cell, Path], str]:
    text, lock = folder / "text" / "library.txt", threading.Lock()

    @cache
    def undisturbed() -> list[float]:
        text.parent.mkdir(exist_ok=True)
        sources = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
        text.write_text("\n".join(source.read_text(errors="replace") for source in sources)[:TEXT_BYTES])
        directory = folder / f"undisturbed.{os.getpid()}"
        directory.mkdir()
        (process,) = start_training(UNDISTURBED, directory, text)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, out + err
        return [line["loss"] for line in metrics(directory / "run")]

    def run(cell: Cell, directory: Path) -> str:
        if isinstance(cell, SignalCell):
            return run_signal_cell(cell, directory)
        with lock:
            losses = undisturbed()
        return run_training_cell(cell, directory, text, losses)

    return run


def _read(results: Path) -> dict[str, str]:
    """What was wrong with each cell when it ran last, "" with a right one."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {line["cell"]: line["wrong"] for line in map(json.loads, lines)}


def _table(cells: list[Cell], seen: dict[str, str]) -> str:
    rows: dict[tuple[str, str, str, str], Counter[bool]] = {}
    for cell in cells:
        place = "one host" if cell.hosts == 1 else f"host {cell.host + 1} of {cell.hosts}"
        process = "stub (the launcher)" if not cell.has_torchrun and cell.process == "launcher" else cell.process
        what = f"{process}, training" if isinstance(cell, TrainingCell) else process
        launcher = "torchrun" if cell.has_torchrun else "plain"
        has_relays = isinstance(cell, SignalCell) and cell.has_relays
        row = (f"{launcher}, relays" if has_relays else launcher, place, what, cell.what)
        rows.setdefault(row, Counter())[seen.get(cell.name) == ""] += 1
    wrong = [cell.name for cell in cells if seen.get(cell.name) != ""]
    head = [
        "# The signal matrix",
        "",
        f"`make signal-matrix`: {len(cells)} runs, {len(wrong)} wrong. In each, one process is stopped (STOP), stopped",
        "for 0.3 or 3 s (CONT), or killed (KILL). Rows of members that train nothing have seven runs: start, step,",
        "idle (a spare waits for the end), and report, moves, confirm, commit of a recovery; those with training two:",
        "evaluation and save. A run is right when every process ends with its documented exit code, none is left,",
        "none has printed a traceback, and who must finish has finished; with training, when all steps have the losses",
        "of the undisturbed run (within 1e-5, fp32) and every byte of each published checkpoint is as it was written.",
        "",
        *(f"- wrong: {name}: {(seen.get(name) or 'not run').splitlines()[0]}" for name in wrong),
        *([""] if wrong else []),
        "| launcher | where | process | what | right | wrong |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} | {count[True]} | {count[False]} |" for row, count in rows.items()),
    ]
    return "\n".join(head) + "\n"


if __name__ == "__main__":
    sys.exit(min(1, main(Path(sys.argv[1]), sys.argv[2:])))
