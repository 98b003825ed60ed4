"""Compares layouts with one process: `python launch/verify.py --config FILE [section.field=value ...]`.

Runs the first steps of the configured run, with its own data, on one process and on several layouts, each rank a thread
of this process, and compares losses, gradients and weights. Exit codes: 0 all layouts are within tolerance, 1 one is
not, 2 invalid input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from parallel3d.commands.parsers import parse
from parallel3d.comparison.compare_runs import OVERFLOW, RunComparison, compare_runs, tolerance_of
from parallel3d.comparison.run_result import RunResult
from parallel3d.config.derived import num_parameters, world_size
from parallel3d.config.layouts import Layout, current_layout, default_layouts, parse_layout, parse_layouts
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.data.corpus import Corpus
from parallel3d.data.run_data import build_evaluation_lanes, build_reader, open_run_corpus
from parallel3d.errors import ConfigError, UserError
from parallel3d.inprocess.harness import run_in_threads
from parallel3d.inprocess.memory_estimate import available_bytes, estimate_bytes
from parallel3d.models.initial_weights import check_initial_weights, open_initial_weights, resolve_initial_weights
from parallel3d.models.make import make_stage
from parallel3d.parallel.abort import AbortToken
from parallel3d.trainer.build import RunLanes, prepare_rank
from parallel3d.trainer.context import RankContext, Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid
from parallel3d.worker.device import choose_num_threads

ONE_PROCESS = "tp1.pp1.dp1"
MAX_USUAL_RANKS = 8
MAX_LOGGED_STEPS = 10
KINDS = ("loss", "first_gradients", "gradients", "weights")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout to compare, with its configuration."""

    name: str
    config: Config


@dataclass(frozen=True, kw_only=True)
class LayoutOutcome:
    """The result of a layout; without a comparison it could not run, because of `error`."""

    case: Case
    comparison: RunComparison | None
    error: str = ""

    @property
    def is_equal(self) -> bool:
        return self.comparison is not None and self.comparison.is_equal

    @property
    def findings(self) -> tuple[str, ...]:
        """Sentences on what is wrong; empty if it is equal."""
        return self.comparison.findings if self.comparison else (self.error,)


def main(arguments: list[str]) -> int:
    options = parse("verify", arguments)
    try:
        one, cases = plan_cases(options)
        changes = list_changes(options)
        for line in describe_start(options, one, cases, changes):
            log(line)
        check_memory([one, *cases], may_exceed=options.yes)
        check_initial_weights(resolve_initial_weights(one.config))
        outcomes = verify(one, cases, options.steps)
    except UserError as error:
        log(str(error))
        return error.exit_code
    print(to_json(options, one, outcomes, changes) if options.json else "\n".join(draw_table(outcomes)))
    return 0 if all(outcome.is_equal for outcome in outcomes) else 1


def log(text: str) -> None:
    """Logs to standard error: standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


# --- what to run ------------------------------------------------------------------------------------------------------


def plan_cases(options: argparse.Namespace) -> tuple[Case, list[Case]]:
    """Returns one process and the layouts to compare with it; raises UserError for a layout that does not fit."""

    def case(layout: Layout) -> Case:
        try:
            config = load_config(options.config, [*options.overrides, *layout.overrides])
            return Case(name=layout.name, config=resolve(config, config_path=options.config))
        except ConfigError as error:
            raise UserError(f"layout {layout.name}: {error}" if layout.overrides else str(error)) from error

    def fits(layout: Layout) -> bool:
        try:
            return world_size(case(layout).config) <= MAX_USUAL_RANKS
        except UserError:
            return False

    if options.layouts:
        layouts = parse_layouts(options.layouts)
        return case(parse_layout(ONE_PROCESS)), [case(layout) for layout in layouts]
    own = case(Layout(name="", fields={})).config
    if world_size(own) > MAX_USUAL_RANKS:
        log(
            f"the configured layout has {world_size(own)} ranks, more than {MAX_USUAL_RANKS}: skipped; name it in"
            " --layouts to run it"
        )
    cases = [case(layout) for layout in (current_layout(own), *default_layouts(fits))]
    known: list[Case] = []
    for each in cases:
        if 1 < world_size(each.config) <= MAX_USUAL_RANKS and each.config not in [other.config for other in known]:
            known.append(each)
    if not known:
        raise UserError(f"no usual layout of up to {MAX_USUAL_RANKS} ranks fits this configuration: give --layouts")
    return case(parse_layout(ONE_PROCESS)), known


def list_changes(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields that the command line overrides, {field: [file's value, new value]}."""
    raw = json.loads(Path(options.config).read_text(encoding="utf-8"))
    changes = {}
    for override in options.overrides:
        field, _, text = override.partition("=")
        node = raw
        for name in field.split("."):
            node = node.get(name, "(not in the file)") if isinstance(node, dict) else "(not in the file)"
        changes[field] = [node, text]
    return changes


def describe_start(
    options: argparse.Namespace, one: Case, cases: Sequence[Case], changes: dict[str, Any]
) -> Iterator[str]:
    config = one.config
    model = f"{num_parameters(config.model):,} parameters, {config.precision.policy}"
    yield f"{options.config}: {model}, {options.steps} steps of {config.batch.global_batch_size} sequences"
    yield "overrides: " + (
        ", ".join(f"{field} {before} -> {after}" for field, (before, after) in changes.items()) or "none"
    )
    yield f"layouts to compare with one process: {', '.join(each.name for each in cases)}; ranks are CPU threads"
    if config.elastic.faults or config.elastic.random_faults.probability:
        yield "injected faults are ignored"
    if config.precision.policy != "fp64":
        yield "precision.policy=fp64 would show the mathematics without rounding"


# --- memory -----------------------------------------------------------------------------------------------------------


def check_memory(cases: Sequence[Case], *, may_exceed: bool) -> None:
    """Logs the memory of the largest case; raises UserError if the machine has less."""
    needed, name = max((estimate_bytes(case.config), case.name) for case in cases)
    available = available_bytes()
    free = f"{available / 2**30:.1f} GiB are free" if available else "free memory is unknown"
    log(f"memory: about {needed / 2**30:.1f} GiB, for {name}; {free}")
    if available and needed > available and not may_exceed:
        raise UserError(
            f"{name} needs about {needed / 2**30:.1f} GiB, since all ranks are in this process, and {free}. Make the "
            "model smaller on the command line (model.num_hidden_layers=2 model.hidden_size=256 ...), choose smaller "
            "--layouts, or continue anyway with --yes"
        )


# --- running ----------------------------------------------------------------------------------------------------------


def verify(one: Case, cases: Sequence[Case], num_steps: int) -> list[LayoutOutcome]:
    """Runs one process, then every case; a case that fails is an outcome, too."""
    corpus = open_run_corpus(one.config, AbortToken(), log)
    width = max(len(case.name) for case in cases)
    theirs = run_case(one, corpus, num_steps, title="one process".ljust(width))
    outcomes = []
    for case in cases:
        try:
            ours = run_case(case, corpus, num_steps, title=case.name.ljust(width))
            outcome = LayoutOutcome(case=case, comparison=compare_runs(ours, theirs, tolerance_of(case.config)))
        except UserError:
            raise
        except Exception as error:  # a layout that does not run, or whose ranks disagree, is not equal
            traceback.print_exc()
            outcome = LayoutOutcome(case=case, comparison=None, error=f"{type(error).__name__}: {error}")
        outcomes.append(outcome)
    return outcomes


def run_case(case: Case, corpus: Corpus, num_steps: int, *, title: str) -> RunResult:
    """Runs the case's first steps with every rank as a thread; logs its progress."""
    config, started = case.config, time.monotonic()
    grid = build_grid(config)
    reader = build_reader(config, corpus)
    torch.set_num_threads(choose_num_threads(config, len(grid.ranks)))  # for threads started later

    def build(rank: int, transports: Transports) -> RankContext:
        torch.set_flush_denormal(True)
        runtime = prepare_rank(
            config,
            rank,
            grid,
            make_stage=make_stage,
            lanes=RunLanes(train=reader, evaluate=build_evaluation_lanes(config, corpus), eos_id=corpus.train.eos_id),
            device=torch.device("cpu"),
            initial=open_initial_weights(resolve_initial_weights(config)),
        )
        start_rank(runtime, grid, transports)
        return runtime

    def log_step(step: int) -> None:
        if step % -(-num_steps // MAX_LOGGED_STEPS) == 0 or step == num_steps:
            log(f"{title}  step {step} of {num_steps}  {time.monotonic() - started:6.1f} s")

    log(f"{title}  {len(grid.ranks)} rank{'s' if len(grid.ranks) > 1 else ''}")
    return run_in_threads(grid, build, num_steps, slots=config.parallel.p2p_slots, on_step=log_step)


# --- the result -------------------------------------------------------------------------------------------------------


def draw_table(outcomes: Sequence[LayoutOutcome]) -> Iterator[str]:
    """Yields a row per layout with its largest differences, the tolerances with their reasons, and the findings."""
    tolerances = list(dict.fromkeys(tolerance_of(outcome.case.config) for outcome in outcomes))
    rows = [
        ["layout", "ranks", "loss", "gradients of step 1", "gradients of the last step", "weights", ""],
        *(describe_outcome(outcome) for outcome in outcomes),
        *(["allowed", "", *(f"{getattr(each, kind):g}" for kind in KINDS), ""] for each in tolerances),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    yield "largest relative differences from one process; for tensors |a - b| / |b| with the tensor's name"
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    for tolerance in tolerances:
        yield f"allowed because: {tolerance.why}"
    for outcome in outcomes:
        for finding in outcome.findings:
            yield f"{outcome.case.name}: {finding}"
    wrong = [outcome for outcome in outcomes if not outcome.is_equal]
    yield f"{len(outcomes) - len(wrong)} of {len(outcomes)} layouts train like one process"


def describe_outcome(outcome: LayoutOutcome) -> list[str]:
    """Returns the cells of a row."""
    name, ranks, comparison = outcome.case.name, str(world_size(outcome.case.config)), outcome.comparison
    if comparison is None:
        return [name, ranks, "", "", "", "", "FAILED"]
    loss, *tensors = (getattr(comparison, kind) for kind in KINDS)
    cells = [f"{each.value:.1e} {each.where}" if each.value or each is OVERFLOW else "0" for each in tensors]
    return [name, ranks, f"{loss.value:.1e}", *cells, "ok" if comparison.is_equal else "BEYOND"]


def to_json(options: argparse.Namespace, one: Case, outcomes: Sequence[LayoutOutcome], changes: dict[str, Any]) -> str:
    """Returns the contents of the table as one JSON object."""
    result = {
        "config": options.config,
        "changed": changes,
        "steps": options.steps,
        "policy": one.config.precision.policy,
        "layouts": [outcome_as_json(outcome) for outcome in outcomes],
        "is_equal": all(outcome.is_equal for outcome in outcomes),
    }
    return json.dumps(result, indent=2)


def outcome_as_json(outcome: LayoutOutcome) -> dict[str, Any]:
    case, comparison = outcome.case, outcome.comparison
    return {
        "layout": case.name,
        "ranks": world_size(case.config),
        "parallel": case.config.parallel.model_dump(),
        "tolerance": asdict(tolerance_of(case.config)),
        **{kind: asdict(getattr(comparison, kind)) if comparison else None for kind in KINDS},
        "findings": outcome.findings,
        "is_equal": outcome.is_equal,
    }
