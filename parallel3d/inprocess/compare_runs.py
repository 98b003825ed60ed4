"""How near two runs of one configuration on different layouts must be, and where they are farthest apart.

The equivalence tests and `launch/verify.py` both judge with this. Differences are relative: of a number |a - b| / |b|,
of a tensor the norm of the difference over the norm. What layouts may not change at all, the initial weights and the
text that was read, is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS, Tolerance
from parallel3d.inprocess.harness import RunResult, relative_difference

MAX_NAMED = 4

BITWISE = Tolerance(loss=0.0, first_gradients=0.0, gradients=0.0, weights=0.0, why="exact sums: the same bits")


def tolerance_of(config: Config, *, tp_size: int = 1) -> Tolerance:
    """What a run of this configuration is allowed, compared with one that differs in nothing but its layout, which has
    that tensor-parallel size: by default with one process."""
    if config.precision.sums == "exact" and config.parallel.tp_size == tp_size:
        return BITWISE
    return POLICY_SPECS[config.precision.policy].tolerance


@dataclass(frozen=True, kw_only=True)
class LargestDifference:
    """The largest difference of one kind, and the step or tensor that has it."""

    value: float
    where: str


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """How far a run is from the one that it should equal; `findings` says in sentences what is beyond tolerance."""

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
    """Two runs of equally many steps; `theirs` is the one that is right.

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
    """A number of every step, or of those that count."""
    values = enumerate(torch.tensor(numbers, dtype=torch.float64), start=1)
    return {f"{what} of step {step}": value for step, value in values if counts is None or counts[step - 1]}


def _differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[LargestDifference]:
    """Of every tensor, the largest first."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    found = (LargestDifference(value=relative_difference(ours[name], theirs[name]), where=name) for name in theirs)
    return sorted(found, key=lambda difference: difference.value, reverse=True)


def _mask_rounding_noise(weights: Mapping[str, Tensor], theirs: RunResult, tolerance: Tolerance) -> dict[str, Tensor]:
    """Our weights, but theirs where rounding decides what an element's gradient is, which AdamW makes whole steps of.

    Such are most biases of keys: they move all scores of a query alike, so that their gradient is 0 but for rounding.
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
    """What no order of adding explains."""
    unequal = [name for name, weight in theirs.initial.items() if not torch.equal(ours.initial[name], weight)]
    if unequal:
        yield f"{len(unequal)} initial weights differ, {unequal[0]} among them"
    if [entry.cursors for entry in ours.entries] != [entry.cursors for entry in theirs.entries]:
        yield "other text was read"


def _beyond(differences: list[LargestDifference], limit: float, what: str) -> Iterator[str]:
    beyond = [difference for difference in differences if difference.value > limit]
    if beyond:
        largest, *others = beyond
        sentence = f"{what} {largest.where} differs by {largest.value:.1e} ({limit:g} is allowed)"
        if others:
            names = [other.where for other in others[:MAX_NAMED]] + ["..."] * (len(others) > MAX_NAMED)
            sentence += f", and {len(others)} more of {len(differences)} do: {', '.join(names)}"
        yield sentence
