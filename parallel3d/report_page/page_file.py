"""Writes the page of one run or of several: `parallel3d report RUN [OTHER ...] --html`."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from parallel3d.config.load import load_config
from parallel3d.errors import UserError
from parallel3d.evaluation.result_history import read_result_history
from parallel3d.evaluation.saved_results import starts_of
from parallel3d.monitor.run_folder import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    PAGE,
    SUMMARY,
    is_being_written,
    iterate_metrics,
    read_metrics,
)
from parallel3d.monitor.upload_history import UPLOADS
from parallel3d.pipeline.planner import Plan
from parallel3d.report_page.html_page import render_page
from parallel3d.report_page.page_data import RunFiles, make_page
from parallel3d.report_page.timeline_chart import plan_timeline


def write_page(folders: Sequence[Path], *, out: Path | None, dollars_per_hour: float | None) -> Path:
    """Writes the page, by default into the first run's folder, and returns its path. Raises UserError for a folder
    without a run or given twice, and where it can't write."""
    path = out or folders[0] / PAGE
    runs = [replace(read_run(folder), name=name) for folder, name in zip(folders, name_runs(folders))]
    page = make_page(runs, dollars_per_hour=dollars_per_hour)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(render_page(page, now_s=time.time()), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"can't write {path} ({error.strerror}): give another place with --out") from None
    return path


def write_page_of(folder: Path) -> None:
    """Writes the page of one run into its folder."""
    write_page([folder], out=None, dollars_per_hour=None)


def write_page_until_finished(
    folders: Sequence[Path], every_s: float, *, out: Path | None, dollars_per_hour: float | None
) -> Path:
    """Writes the page again and again, until the first run has ended."""
    while not (folders[0] / SUMMARY).exists():
        write_page(folders, out=out, dollars_per_hour=dollars_per_hour)
        time.sleep(every_s)
    return write_page(folders, out=out, dollars_per_hour=dollars_per_hour)


def name_runs(folders: Sequence[Path]) -> list[str]:
    """The names under which the runs are shown: those of their folders, with as many parents as make them different.

    Raises UserError for a folder that is given twice, under whatever path.
    """
    paths = [folder.resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            first = folders[paths.index(path)]
            raise UserError(f"{folders[number]}: the same folder as {first}; give each run once")
    num_parts = [1] * len(paths)
    while True:
        names = [str(Path(*path.parts[-count:])) for path, count in zip(paths, num_parts)]
        counts = Counter(names)
        if max(counts.values()) == 1:
            return names
        num_parts = [count + (counts[name] > 1) for name, count in zip(names, num_parts)]


def read_run(folder: Path) -> RunFiles:
    """The files of a run. Raises UserError before its first step."""
    try:
        lines = read_metrics(folder / METRICS)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{folder} is not the folder of a run: can't read {METRICS} ({reason})") from None
    if not any("event" not in line and "step" in line for line in lines):
        raise UserError(f"{folder}: {METRICS} holds no step yet")
    damages: list[str] = []
    try:
        uploads = read_metrics(folder / UPLOADS)
    except (OSError, ValueError):
        uploads = []
    return RunFiles(
        name=folder.resolve().name,
        lines=lines,
        config=_read(folder / CONFIG),
        environment=_read(folder / ENVIRONMENT),
        first_environment=read_first_environment(folder, lines),
        summary=_read(folder / SUMMARY),
        uploads=uploads,
        results=read_result_history(folder, starts_of(lines), damages.append),
        result_damages=damages,
        plan=read_plan(folder / CONFIG),
        read_at=time.time() if is_being_written(folder) else None,
    )


def read_first_environment(folder: Path, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The environment of the first of several legs, from the folder to which the leg after it has moved its files;
    {} of a single leg, and where that folder is missing."""
    starts = [line for line in lines if line.get("event") == "started"]
    if len(starts) > 1:
        moved = [path for path in folder.glob("previous-*") if path.name.removeprefix("previous-").isdecimal()]
        for path in sorted(moved, key=lambda path: int(path.name.removeprefix("previous-"))):
            if starts_until(path / METRICS, 2) == starts[:1]:  # later legs have more, other runs another one
                return _read(path / ENVIRONMENT)
    return {}


def starts_until(path: Path, number: int) -> list[dict[str, Any]]:
    """The first lines `started` of a metrics.jsonl, up to this number; none of one that can't be read."""
    try:
        return [*islice((line for line in iterate_metrics(path) if line.get("event") == "started"), number)]
    except (OSError, ValueError):
        return []


def read_plan(path: Path) -> Plan | None:
    """The plan of the pipeline that a resolved configuration describes; None without a pipeline, and for a
    configuration that this version can't read or plan: the page does without."""
    try:
        return plan_timeline(load_config(path))
    except (UserError, OSError, ValueError, LookupError, AssertionError):
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
