"""The results of a run's checkpoints as tables: a line for each checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parallel3d.evaluation.results import format_table
from parallel3d.evaluation.saved_results import ResultFolder, RunStart


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


def format_history(history: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A table for each set: a line for each checkpoint, with the main figures of each text or task."""
    tables = []
    for name, rows in history.items():
        lines = {
            f"step {row['step']:,}": {"tokens trained": row["tokens"], **main_figures(row["results"])} for row in rows
        }
        tables.append(f"{name}\n{format_table(lines)}" if lines else f"{name}: nothing yet")
    return "\n\n".join(tables)


def main_figures(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The loss of each text, the accuracy of last words, and of tasks all but standard errors."""
    found = {}
    for group, figures in results.items():
        main = [name for name in ("loss", "accuracy") if name in figures][:1]
        for name in main or [name for name in figures if "stderr" not in name]:
            found[f"{group}: {name}"] = figures[name]
    return found
