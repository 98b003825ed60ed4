"""`study layout`: runs the best layouts of `plan`'s ranking for a few steps, and shows predicted and measured times."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel3d.commands.study_runs import StudyRunner, print_line, study_config
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.layout_estimate import LayoutEstimate
from parallel3d.costs.layout_search import LayoutChoice, RankedLayouts, rank_layouts
from parallel3d.costs.machines import Machines, parse_machines
from parallel3d.errors import ConfigError, UserError
from parallel3d.models.make import shardings_of
from parallel3d.studies.study_run import StudyRun
from parallel3d.studies.text_table import draw_columns, number

LEAST_STEPS = 3
"""The first is not timed."""


def study_layout(options: argparse.Namespace) -> int:
    """Runs the study; prints the table. Returns the exit code."""
    config = resolve(load_config(options.config, options.overrides), config_path=options.config)
    machines = _machines(options)
    policies = options.policies.split(",") if options.policies else ()
    if unknown := [name for name in policies if name not in POLICY_SPECS]:
        raise UserError(f"--policies {', '.join(unknown)}: there are {', '.join(POLICY_SPECS)}")
    if options.steps < LEAST_STEPS:
        raise UserError(f"--steps {options.steps}: the first step is not timed; give {LEAST_STEPS} or more")
    parts = LayeredParameters.of(shardings_of(config.model), config.model.num_hidden_layers)
    ranked = rank_layouts(config, parts, machines, policies)
    if not ranked.estimates:
        raise UserError(f"--devices {machines}: no layout fits; `parallel3d plan --devices ... --search` says why")
    out = options.out or Path(f"runs/{Path(options.config).stem}-layout")
    runner = StudyRunner(out, num_runs=min(options.top, len(ranked.estimates)))
    chosen = list(_runnable(ranked, runner, options.top, options.steps))
    runs = [runner.run(name_of(layout), each) for layout, _, each in chosen]
    rows = [(layout, estimate, run) for (layout, estimate, _), run in zip(chosen, runs)]
    result = _as_json(options, machines, rows)
    result["written_to"] = str(runner.write_result(result))
    print_line(json.dumps(result, indent=2) if options.json else "\n".join(_describe(machines, ranked, rows, result)))
    return 0


def _machines(options: argparse.Namespace) -> Machines:
    found = parse_machines(options.devices, options.device_table)
    if len(found) > 1 or found[0].num_hosts > 1:
        raise UserError(f"--devices {options.devices}: runs are on this host: give one host, as in 4xH100-80GB")
    return found[0]


def name_of(layout: LayoutChoice) -> str:
    """The name of a layout's run."""
    grid = f"tp{layout.tp}.pp{layout.pp}.dp{layout.dp}" + (f".{layout.schedule}" if layout.pp > 1 else "")
    return f"{grid}-micro{layout.micro_batch}-{layout.recompute}-{layout.policy}"


def _runnable(
    ranked: RankedLayouts, runner: StudyRunner, most: int, steps: int
) -> Iterator[tuple[LayoutChoice, LayoutEstimate, Config]]:
    """Yields the best layouts that the configuration's rules allow, with the configurations of their runs."""
    count = 0
    for layout, estimate in zip(ranked.layouts, ranked.estimates):
        if count == most:
            return
        changes = {name: getattr(estimate.config, name).model_dump() for name in ("parallel", "batch", "precision")}
        try:
            config = study_config(estimate.config, runner.folder_of(name_of(layout)), num_steps=steps, changes=changes)
        except ConfigError:
            continue  # a rule between fields that the ranking does not know
        count += 1
        yield layout, estimate, config


Row = tuple[LayoutChoice, LayoutEstimate, StudyRun]


def _describe(
    machines: Machines, ranked: RankedLayouts, rows: Sequence[Row], result: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a row per layout: predicted and measured seconds of a step, each also as a ratio to the first."""
    table = [["", "predicted s", "of the first", "measured s", "of the first", "measured/predicted", "layout"]]
    first_measured = next((run.step_s for _, _, run in rows if run.step_s), None)
    for place, (layout, estimate, run) in enumerate(rows, start=1):
        measured = run.step_s if not run.ended else None
        table.append(
            [
                str(place),
                f"{estimate.step_s:.4f}",
                f"{estimate.step_s / rows[0][1].step_s:.2f}",
                number(measured) if measured else run.ended or "-",
                number(measured / first_measured, ".2f") if measured and first_measured else "-",
                number(measured / estimate.step_s, ".2f") if measured else "-",
                str(layout),
            ]
        )
    yield f"{machines}: {len(ranked.estimates):,} layouts fit; the best {len(rows)} of the ranking, run on this machine"
    yield from draw_columns(table, left=(6,))
    if best := _fastest(rows):
        yield ""
        yield f"fastest measured: {best[0]} ({best[2].step_s:.4f} s a step)"
    yield f"written to {result['written_to']}"


def _fastest(rows: Sequence[Row]) -> Row | None:
    timed = [row for row in rows if row[2].step_s and not row[2].ended]
    return min(timed, key=lambda row: row[2].step_s or 0.0, default=None)


def _as_json(options: argparse.Namespace, machines: Machines, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "kind": "layout",
        "config": options.config,
        "overrides": options.overrides,
        "devices": str(machines),
        "layouts": [
            {"layout": asdict(layout), "predicted_step_s": estimate.step_s, "run": run.summary()}
            for layout, estimate, run in rows
        ],
    }
