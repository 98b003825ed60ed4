"""`study precision`: each policy with the same seeds and text, next to a reference; stops one at its first sign."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel3d.commands.study_parsers import chosen_seeds
from parallel3d.commands.study_runs import FindSign, StudyRunner, print_line, study_config
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS, PolicySpec
from parallel3d.config.warmup_builder import num_steps
from parallel3d.errors import UserError
from parallel3d.optim.update_rules import find_rule
from parallel3d.studies.precision_verdict import (
    PolicyCourse,
    PolicyResult,
    PrecisionVerdict,
    ReferenceCourse,
    judge_policies,
)
from parallel3d.studies.study_run import StudyRun
from parallel3d.studies.text_table import draw_columns, number

LEAST_SEEDS = 2
"""One does not show the noise."""


def study_precision(options: argparse.Namespace) -> int:
    """Runs the study; prints the table and the recommendation. Returns the exit code."""
    config = resolve(load_config(options.config, options.overrides), config_path=options.config)
    names, reference, seeds = _choices(options, config)
    out = options.out or Path(f"runs/{Path(options.config).stem}-precision")
    runner = StudyRunner(out, num_runs=len(names) * len(seeds))
    configs = {(name, seed): _config_of(config, runner, name, seed, options.steps) for name in names for seed in seeds}
    runs = {reference: [runner.run(f"{reference}-seed{seed}", configs[reference, seed]) for seed in seeds]}
    courses = _reference_courses(runs[reference])
    for name in names:
        if name != reference:
            runs[name] = _run_policy(runner, name, {seed: configs[name, seed] for seed in seeds}, courses)
    results = [_result_of(config, name, runs[name]) for name in names]
    verdict = judge_policies(results, reference, margin=options.margin, by_memory=options.by == "memory")
    result = _as_json(options, runs, verdict)
    result["written_to"] = str(runner.write_result(result))
    print_line(json.dumps(result, indent=2) if options.json else "\n".join(_describe(verdict, result)))
    return 0 if verdict.recommended else 1


def _choices(options: argparse.Namespace, config: Config) -> tuple[list[str], str, list[int]]:
    """The policies, the reference first, and the seeds. Raises UserError."""
    names = options.policies.split(",")
    if unknown := [name for name in names if name not in POLICY_SPECS]:
        raise UserError(f"--policies {', '.join(unknown)}: there are {', '.join(POLICY_SPECS)}")
    if len(set(names)) < max(2, len(names)):
        raise UserError(f"--policies {options.policies}: give two or more different ones")
    reference = options.reference or names[0]
    if reference not in names:
        raise UserError(f"--reference {reference}: must be one of --policies {options.policies}")
    seeds = chosen_seeds(options.seeds, config.run.seed)
    if len(seeds) < LEAST_SEEDS:
        raise UserError(f"--seeds: {len(seeds)} does not show the noise; give {LEAST_SEEDS} or more")
    return [reference, *(name for name in names if name != reference)], reference, seeds


def _config_of(config: Config, runner: StudyRunner, name: str, seed: int, steps: int | None) -> Config:
    folder = runner.folder_of(f"{name}-seed{seed}")
    changes: dict[str, dict[str, Any]] = {"run": {"seed": seed}, "precision": {"policy": name}}
    return study_config(config, folder, num_steps=steps or num_steps(config), changes=changes)


def _reference_courses(runs: list[StudyRun]) -> dict[int, ReferenceCourse]:
    """By seed. Runs that ended early are none, but still widen the noise where they have steps."""
    losses = {run.seed: run.losses for run in runs}
    return {run.seed: ReferenceCourse.of(run.seed, losses, run.grad_norms) for run in runs if not run.ended}


def _run_policy(
    runner: StudyRunner, name: str, configs: dict[int, Config], courses: dict[int, ReferenceCourse]
) -> list[StudyRun]:
    """The runs of a policy, up to the first that ends early."""
    found: list[StudyRun] = []
    for seed, config in configs.items():
        run_name = f"{name}-seed{seed}"
        if found and found[-1].ended:
            runner.skip(run_name, f"{name} has ended early with seed {found[-1].seed}")
        elif seed not in courses:
            runner.skip(run_name, "the reference did not reach its end with this seed")
        else:
            judged_by = hashlib.sha256(repr(courses[seed]).encode()).hexdigest()
            found.append(runner.run(run_name, config, watch_policy(courses[seed]), judged_by=judged_by))
    return found


def watch_policy(reference: ReferenceCourse) -> FindSign:
    """Follows a run next to its reference."""
    course = PolicyCourse()

    def find_sign(loss: float | None, grad_norm: float | None) -> str:
        nonlocal course
        course = course.after(loss, grad_norm, reference)
        return course.sign

    return find_sign


def _result_of(config: Config, name: str, runs: list[StudyRun]) -> PolicyResult:
    times = [run.step_s for run in runs if run.step_s is not None]
    ended = next((run for run in runs if run.ended), None)
    return PolicyResult(
        name=name,
        losses={run.seed: run.judged_loss for run in runs if run.judged_loss is not None},
        sign=f"{ended.ended} (seed {ended.seed})" if ended else "",
        step_s=min(times, default=None),  # other load on the machine only slows
        bytes_per_parameter=bytes_per_parameter(POLICY_SPECS[name], config.optimizer.kind),
    )


def bytes_per_parameter(spec: PolicySpec, optimizer: str) -> float:
    """Of weights, main gradients, moments and master weights, over all ranks that share them."""
    states = len(find_rule(optimizer).states) + (1 if spec.has_master else 0)
    return spec.compute.num_bytes + spec.grad.num_bytes + states * spec.state.num_bytes


# --- the result -------------------------------------------------------------------------------------------------------


def _describe(verdict: PrecisionVerdict, result: dict[str, Any]) -> Iterator[str]:
    """Yields a row per policy, and the recommendation."""
    rows = [["policy", "loss", f"- {verdict.reference}", "p", "ms a step", "bytes a parameter", "judgement"]]
    for each in verdict.judgements:
        losses, compared = list(each.result.losses.values()), each.comparison
        mean = sum(losses) / len(losses) if losses else None
        step_ms = None if each.result.step_s is None else 1e3 * each.result.step_s
        difference = number(compared.spread.mean, "+.4f") if compared else "-"
        p = number(compared.p, ".2g") if compared else "-"
        size = f"{each.result.bytes_per_parameter:g}"
        rows.append([each.result.name, number(mean), difference, p, number(step_ms, ".0f"), size, each.reason])
    yield from draw_columns(rows, left=(0, len(rows[0]) - 1))
    yield ""
    yield f"differences of up to {verdict.margin:.4f} nats a token do not count"
    yield f"recommended: {verdict.reason}" if verdict.recommended else f"no recommendation: {verdict.reason}"
    yield f"written to {result['written_to']}"


def _as_json(options: argparse.Namespace, runs: dict[str, list[StudyRun]], verdict: PrecisionVerdict) -> dict[str, Any]:
    return {
        "kind": "precision",
        "config": options.config,
        "overrides": options.overrides,
        "reference": verdict.reference,
        "margin": verdict.margin,
        "recommended": verdict.recommended,
        "reason": verdict.reason,
        "policies": {
            each.result.name: {
                "is_fit": each.is_fit,
                "reason": each.reason,
                "step_s": each.result.step_s,
                "bytes_per_parameter": each.result.bytes_per_parameter,
                "losses": {str(seed): loss for seed, loss in each.result.losses.items()},
                "differences": asdict(each.comparison.spread) if each.comparison else None,
                "p": each.comparison.p if each.comparison else None,
            }
            for each in verdict.judgements
        },
        "runs": {name: [run.summary() for run in each] for name, each in runs.items()},
    }
