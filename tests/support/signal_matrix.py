"""The whole signal matrix: FOLDER [NAME ...]. Cells that FOLDER has right results of aren't run again.

Some hours on two cores, so the tests run rows of it (test_signal_matrix.py, test_signal_matrix_of_training.py). Writes
docs/logs/signal_matrix.md once all have run. Each line of FOLDER/results.jsonl has the seconds beyond the stated
patience that a run took to go on, or to end (patience.py). They fail nothing, since other work on the machine counts.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.launch_runs import metrics
from tests.support.patience import LIMIT_S, Cell, excess_s
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
Result = dict[str, Any]
"""`wrong`: "" if nothing is; `excess_s`: None if it is not known."""


def all_cells() -> list[Cell]:
    return [*all_signal_cells(), *all_training_cells()]


def main(folder: Path, wanted: list[str]) -> int:
    """Returns the number of cells that are wrong, or have not been run."""
    folder.mkdir(parents=True, exist_ok=True)
    results, cells, lock = folder / "results.jsonl", all_cells(), threading.Lock()
    seen, run_cell = _read(results), _runner(folder)

    def run(cell: Cell) -> None:
        times = sum(path.name.startswith(f"{cell.name}.") for path in folder.iterdir())
        directory = folder / f"{cell.name}.{times}"
        result: Result = {"wrong": run_cell(cell, directory), "excess_s": _rounded(excess_s(cell, directory))}
        with lock, results.open("a") as file:
            file.write(json.dumps({"cell": cell.name, **result}) + "\n")
        print(f"{cell.name}: {result['wrong'] or 'right'}, {result['excess_s']} s beyond its patience", flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run, (c for c in cells if c.name in wanted or (not wanted and not _is_right(c, seen)))))
    seen = _read(results)
    print(_summary([cell for cell in cells if not wanted or cell.name in wanted], seen))
    if not wanted:
        LOG.write_text(_table(cells, seen))
    return sum(not _is_right(cell, seen) for cell in cells)


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


def _read(results: Path) -> dict[str, Result]:
    """The result of each cell when it ran last."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {line["cell"]: line for line in map(json.loads, lines)}


def _is_right(cell: Cell, seen: dict[str, Result]) -> bool:
    return cell.name in seen and not seen[cell.name]["wrong"]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def _excess(cells: Iterable[Cell], seen: dict[str, Result]) -> list[float]:
    """The seconds beyond the patience of those cells of which they are known, the largest last."""
    known = [seen[cell.name].get("excess_s") for cell in cells if cell.name in seen]
    return sorted(each for each in known if each is not None)


def _table(cells: list[Cell], seen: dict[str, Result]) -> str:
    rows: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in cells:
        place = "one host" if cell.hosts == 1 else f"host {cell.host + 1} of {cell.hosts}"
        process = "stub (the launcher)" if not cell.has_torchrun and cell.process == "launcher" else cell.process
        what = f"{process}, training" if isinstance(cell, TrainingCell) else process
        launcher = "torchrun" if cell.has_torchrun else "plain"
        has_relays = isinstance(cell, SignalCell) and cell.has_relays
        row = (f"{launcher}, relays" if has_relays else launcher, place, what, cell.what)
        rows.setdefault(row, []).append(cell)
    wrong = [cell.name for cell in cells if not _is_right(cell, seen)]
    late = [cell.name for cell in cells if any(each > LIMIT_S for each in _excess([cell], seen))]
    head = [
        "# The signal matrix",
        "",
        f"`make signal-matrix`: {len(cells)} runs, {len(wrong)} wrong. In each, one process is stopped (STOP), stopped",
        "for 0.3 or 3 s (CONT), or killed (KILL). Rows of members that train nothing have seven runs: start, step,",
        "idle (a spare waits for the end), and report, moves, confirm, commit of a recovery (commit: after the commit",
        "has arrived, before the first exchange of the new generation); those with training three: evaluation, save,",
        "and the new groups of a recovery. A run is right when every process ends with its documented exit code, none",
        "is left, none has printed a traceback or written one into its log, and who must finish has finished; with",
        "training, when all steps have the losses of the undisturbed run (bit for bit, with exact sums) and every byte",
        "of each published checkpoint is as it was written.",
        "",
        "Excess: the most seconds, of a row's runs, from the signal to the first step after the change that it caused",
        "(to the next step, if it caused none), or to the end of all processes of a run that ends, less the stated",
        f"patience (`patience_s` in tests/support/patience.py). {_summary(cells, seen)}",
        "",
        *(f"- wrong: {name}: {_why(name, seen)}" for name in wrong),
        *(f"- beyond {LIMIT_S:g} s: {name}: {seen[name]['excess_s']}" for name in late),
        *([""] if wrong or late else []),
        "| launcher | where | process | what | right | wrong | excess, s |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} | {_counts(members, seen)} |" for row, members in rows.items()),
    ]
    return "\n".join(head) + "\n"


def _summary(cells: Iterable[Cell], seen: dict[str, Result]) -> str:
    excess = _excess(cells, seen)
    shares = f"median {_of(excess, 0.5)}, 90 % up to {_of(excess, 0.9)}, all up to {_of(excess, 1.0)}"
    return f"Of {len(excess)} runs: {shares}; {sum(each > LIMIT_S for each in excess)} beyond {LIMIT_S:g} s."


def _why(name: str, seen: dict[str, Result]) -> str:
    return str(seen[name]["wrong"]).splitlines()[0] if name in seen else "not run"


def _counts(cells: list[Cell], seen: dict[str, Result]) -> str:
    right = sum(_is_right(cell, seen) for cell in cells)
    return f"{right} | {len(cells) - right} | {_of(_excess(cells, seen), 1.0)}"


def _of(excess: list[float], share: float) -> str:
    """The value up to which this share of them is."""
    return f"{excess[max(0, math.ceil(share * len(excess)) - 1)]:.2f}" if excess else "-"


if __name__ == "__main__":
    sys.exit(min(1, main(Path(sys.argv[1]), sys.argv[2:])))
