"""`study golden`: records the losses of a run, or compares another run with them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel3d.commands.study_runs import print_line, read_run_folder
from parallel3d.errors import UserError
from parallel3d.monitor.history import MetricsLog
from parallel3d.monitor.run_folder import METRICS, read_metrics
from parallel3d.studies.golden_losses import (
    GoldenComparison,
    GoldenLosses,
    compare_with_golden,
    default_rtol,
    settings_that_decide,
)

GOLDEN = "golden.json"


def study_golden(options: argparse.Namespace) -> int:
    """Records or compares. Returns 1 if a loss differs."""
    path = options.against or options.run / GOLDEN
    if options.rtol is not None and not options.rtol >= 0:
        raise UserError(f"--rtol {options.rtol:g}: must not be negative")
    run = read_losses(options.run, options.rtol)
    if options.record:
        record(run, path)
        print_line(f"{len(run.losses):,} losses recorded in {path}, to be met within {run.rtol:g} ({run.policy})")
        return 0
    found = compare_with_golden(read_golden(path), run.losses, run.settings, options.rtol)
    print_line(json.dumps(_as_json(found, options.run, path), indent=2) if options.json else "\n".join(describe(found)))
    return 0 if found.is_equal else 1


def read_losses(folder: Path, rtol: float | None) -> GoldenLosses:
    """The losses of a run. Raises UserError where there are none."""
    run, config = read_run_folder(folder)
    if not run.losses:
        raise UserError(f"{folder}: {METRICS} holds no step yet")
    steps = [int(line["step"]) for line in MetricsLog.of(read_metrics(folder / METRICS)).steps]
    policy = config["precision"]["policy"]
    return GoldenLosses(
        policy=policy,
        rtol=default_rtol(policy) if rtol is None else rtol,
        losses=dict(zip(steps, run.losses)),
        settings=settings_that_decide(config),
    )


def record(golden: GoldenLosses, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(golden.to_json(), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"can't write {path} ({error.strerror}): name another file with --against") from None


def read_golden(path: Path) -> GoldenLosses:
    """Raises UserError where the file holds something else."""
    try:
        return GoldenLosses.from_json(json.loads(path.read_text()))
    except OSError as error:
        how = "record them with `parallel3d study golden RUN_FOLDER --record`, or name them with --against"
        raise UserError(f"no golden losses in {path} ({error.strerror}): {how}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not hold golden losses ({error!r}): record them again with --record") from None


def describe(found: GoldenComparison) -> Iterator[str]:
    """Yields the differing settings, the largest difference, and the verdict with the first step that differs."""
    yield from (f"another setting: {line}" for line in found.settings)
    if found.largest is not None and found.largest.relative:
        yield f"largest difference of two losses: {found.largest}"
    if found.first is None:
        yield f"equal: {found.num_steps:,} steps within {found.rtol:g} of the golden losses"
        return
    yield f"DIFFERENT: {found.num_different:,} of {found.num_steps:,} steps are beyond {found.rtol:g}; the first is"
    yield f"  {found.first}"


def _as_json(found: GoldenComparison, folder: Path, path: Path) -> dict[str, Any]:
    return {"kind": "golden", "run": str(folder), "against": str(path), "is_equal": found.is_equal, **asdict(found)}
