"""The results of a run's checkpoints as tables: a line for each checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from parallel3d.errors import UserError
from parallel3d.evaluation.result_figures import ResultHistory, main_figures
from parallel3d.evaluation.results import format_table
from parallel3d.evaluation.saved_results import ResultFolder, RunStart, result_folders


def history_of(folders: Iterable[ResultFolder], starts: Iterable[RunStart]) -> dict[str, list[dict[str, Any]]]:
    """By set, a row for each checkpoint: step, tokens trained, and all figures of each text or task."""
    starts = [*starts]
    return {
        folder.name: [
            {"step": saved.step, "tokens": saved.tokens, "results": report["results"]}
            for saved, report in folder.reports(starts).items()
        ]
        for folder in folders
    }


def read_result_history(
    run_folder: Path, starts: Sequence[RunStart], on_damage: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """`history_of` all sets in a run's folder. One with a damaged file is left out, and `on_damage` gets the reason."""
    found: dict[str, list[dict[str, Any]]] = {}
    for folder in result_folders(run_folder):
        try:
            found |= history_of([folder], starts)
        except UserError as error:
            on_damage(str(error))
    return found


def format_history(history: ResultHistory) -> str:
    """A table for each set: a line for each checkpoint, with the main figures of each text or task."""
    tables = []
    for name, rows in history.items():
        lines = {
            f"step {row['step']:,}": {"tokens trained": row["tokens"], **main_figures(row["results"])} for row in rows
        }
        tables.append(f"{name}\n{format_table(lines)}" if lines else f"{name}: nothing yet")
    return "\n\n".join(tables)
