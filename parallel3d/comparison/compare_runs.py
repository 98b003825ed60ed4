"""Compares two runs of one configuration on different layouts with the tolerance of its precision policy.

Used by the equivalence tests, `launch/verify.py` and `launch/preflight.py`. Differences are relative: |a - b| / |b| of
a number, the norm of the difference over the norm of a tensor. Initial weights and the data read do not depend on the
layout and are compared bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comparison.run_result import RunResult
from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS, Tolerance

MAX_NAMED = 4
TINY = 1e-30

BITWISE = Tolerance(loss=0.0, first_gradients=0.0, gradients=0.0, weights=0.0, why="exact sums: the same bits")


def tolerance_of(config: Config, *, tp_size: int = 1) -> Tolerance:
    """Returns the tolerance against a run that differs only in its layout and has tensor-parallel size `tp_size`."""
    if config.precision.sums == "exact" and config.parallel.tp_size == tp_size:
        return BITWISE
    return POLICY_SPECS[config.precision.policy].tolerance


@dataclass(frozen=True, kw_only=True)
class LargestDifference:
    """The largest difference of one kind, and its step or tensor."""

    value: float
    where: str


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """A run's differences from the one that it should equal; `findings` are sentences on those beyond tolerance."""

    loss: LargestDifference
    first_gradients: LargestDifference
    gradients: LargestDifference
    weights: LargestDifference
    findings: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return not self.findings


OVERFLOW = LargestDifference(value=0.0, where="(overflow)")


def compare_runs(ours: RunResult, theirs: RunResult, tolerance: Tolerance) -> RunComparison:
    """Compares two runs of the same number of steps; `theirs` is the reference.

    Gradients and norms of a step that overflows in both, and so updates nothing in either, are not compared.
    """
    finite = [mine.finite or yours.finite for mine, yours in zip(ours.entries, theirs.entries)]
    differences = {
        "loss": _differences(_losses(ours), _losses(theirs)),
        "first_gradients": _differences(ours.first_gradients, theirs.first_gradients) if finite[0] else [OVERFLOW],
        "gradients": _differences(ours.gradients, theirs.gradients) if finite[-1] else [OVERFLOW],
        "weights": _differences(_mask_rounding_noise(ours.weights, theirs, tolerance), theirs.weights),
    }
    norms = _differences(*(_by_step("gradient norm", run.grad_norms, finite) for run in (ours, theirs)))
    findings = [
        *_find_unequal_starts(ours, theirs),
        *_beyond(differences["loss"], tolerance.loss, "the"),
        *_beyond(norms, tolerance.gradients, "the"),
        *_beyond(differences["first_gradients"], tolerance.first_gradients, "the first step's gradient of"),
        *_beyond(differences["gradients"], tolerance.gradients, "the last step's gradient of"),
        *_beyond(differences["weights"], tolerance.weights, "the trained"),
    ]
    return RunComparison(**{name: largest for name, (largest, *_) in differences.items()}, findings=tuple(findings))


def _losses(run: RunResult) -> dict[str, Tensor]:
    losses = _by_step("loss", run.losses)
    if run.evaluation is not None:
        losses["loss of the evaluation"] = torch.tensor(run.evaluation, dtype=torch.float64)
    return losses


def _by_step(what: str, numbers: Sequence[float], counts: Sequence[bool] | None = None) -> dict[str, Tensor]:
    """Returns a number of every step, or of those with `counts`."""
    values = enumerate(torch.tensor(numbers, dtype=torch.float64), start=1)
    return {f"{what} of step {step}": value for step, value in values if counts is None or counts[step - 1]}


def _differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[LargestDifference]:
    """Returns the difference of every tensor, the largest first."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    found = (LargestDifference(value=relative_difference(ours[name], theirs[name]), where=name) for name in theirs)
    return sorted(found, key=lambda difference: difference.value, reverse=True)


def _mask_rounding_noise(weights: Mapping[str, Tensor], theirs: RunResult, tolerance: Tolerance) -> dict[str, Tensor]:
    """Returns our weights, but theirs where an element's gradient is rounding noise, from which AdamW makes full steps.

    Most key biases are an example: they shift all scores of a query equally, so that their gradient is 0 up to
    rounding.
    """
    limits = (
        (theirs.entries[0], theirs.first_gradients, tolerance.first_gradients),
        (theirs.entries[-1], theirs.gradients, tolerance.gradients),
    )
    settled = dict(weights)
    for name, weight in theirs.weights.items():
        for gradients, limit in ((gradients, limit) for entry, gradients, limit in limits if entry.finite):
            size = gradients[name].abs()
            floor = limit * size.square().mean().sqrt()
            settled[name] = torch.where((size > 0) & (size < floor), weight, settled[name])
    return settled


def _find_unequal_starts(ours: RunResult, theirs: RunResult) -> Iterator[str]:
    """Yields differences that no order of summation explains."""
    unequal = [name for name, weight in theirs.initial.items() if not torch.equal(ours.initial[name], weight)]
    if unequal:
        yield f"{len(unequal)} initial weights differ, including {unequal[0]}"
    if [entry.cursors for entry in ours.entries] != [entry.cursors for entry in theirs.entries]:
        yield "the runs have read different data"


def _beyond(differences: list[LargestDifference], limit: float, what: str) -> Iterator[str]:
    beyond = [difference for difference in differences if difference.value > limit]
    if beyond:
        largest, *others = beyond
        sentence = f"{what} {largest.where} differs by {largest.value:.1e} ({limit:g} is allowed)"
        if others:
            names = [other.where for other in others[:MAX_NAMED]] + (["..."] if len(others) > MAX_NAMED else [])
            sentence += f", and {len(others)} more of {len(differences)} do: {', '.join(names)}"
        yield sentence


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """Returns the largest |a - b| / |b| of a tensor (Euclidean norms; infinite if not finite), and its name."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max((relative_difference(ours[name], theirs[name]), name) for name in theirs)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Returns |a - b| / |b|; infinite if not finite."""
    distance, size = (torch.linalg.vector_norm(x, dtype=torch.float64).item() for x in (ours - theirs, theirs))
    return distance / max(size, TINY) if math.isfinite(distance) else math.inf
