"""Decides when a precision policy has left its reference, and which policy to take. Pure.

A policy's run is stopped at the first of these signs, where its reference (the same seed and text) shows none:

    its loss is above 1.2 times its lowest one for 5 steps in a row (monitor/loss_ratio.py)
    its gradient norm is in a spike of at least 10 steps (monitor/spikes.py), twice as long as any of the reference's
    until then, while the loss is above the reference's
    its smoothed loss is above the reference's by more than the noise for 20 steps in a row

Smoothed is a median over 20 steps, which a short spike does not move: a run may recover. The noise at a step is 3
standard deviations of the reference's smoothed losses over the seeds, at least 0.5 % of the loss. Runs also end by the
trainer's rules (monitor/divergence.py, non-finite losses).

Of the policies that remain, one is worse beyond noise if its loss, seed by seed, is above the reference's by more than
`margin` in the mean, and if either a paired t-test finds that at p < 0.05 or it is more than one standard deviation of
the reference's seeds. The cheapest of the others is recommended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import median, stdev

from parallel3d.monitor.loss_ratio import UNSTABLE_RATIO, LossRatio
from parallel3d.monitor.spikes import Spikes
from parallel3d.studies.seed_noise import SIGNIFICANT_P, PairedComparison, SeedSpread, compare_by_seed

SMOOTHED_STEPS = 20
UNSTABLE_STEPS = 5
LONG_SPIKE = 10
FAR_STEPS = 20
NOISE_SDS = 3.0
LEAST_NOISE = 0.005
"""Share of the loss."""
MARGIN_SDS = 0.25
"""The default margin, in standard deviations of the reference's seeds: a seed moves a loss four times as far."""
SAME_COST = 1.05
"""Step times of short runs within 5 % are equal: then the policy with fewer bytes a parameter is cheaper."""

Losses = Sequence[float | None]


def smoothed(losses: Losses) -> list[float]:
    """The median of the last SMOOTHED_STEPS losses after each step, of fewer at the start; None counts as infinite."""
    values = [inf if loss is None else loss for loss in losses]
    return [median(values[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(values) + 1)]


@dataclass(frozen=True, kw_only=True)
class ReferenceCourse:
    """The reference's run with one seed, and the noise of all of its seeds, by step."""

    losses: tuple[float, ...]
    """Smoothed."""
    noise: tuple[float, ...]
    """Above which a distance is not noise."""
    unstable: tuple[int, ...]
    """Consecutive steps with a high loss ratio, after each step."""
    longest_spike: tuple[int, ...]
    """Until each step."""

    @staticmethod
    def of(seed: int, losses: Mapping[int, Losses], grad_norms: Losses) -> ReferenceCourse:
        """losses: of all seeds; grad_norms: of this seed."""
        curves = {each: smoothed(course) for each, course in losses.items()}
        own = curves[seed]
        noise = []
        for step, loss in enumerate(own):
            values = [curve[step] for curve in curves.values() if step < len(curve) and isfinite(curve[step])]
            sd = stdev(values) if len(values) > 1 else 0.0
            noise.append(max(NOISE_SDS * sd, LEAST_NOISE * loss))
        course = PolicyCourse()
        unstable: list[int] = []
        longest: list[int] = []
        for loss_now, norm in zip(losses[seed], grad_norms):
            course = course.with_step(loss_now, norm)
            unstable.append(course.num_unstable)
            longest.append(max(longest[-1] if longest else 0, course.spikes.length))
        return ReferenceCourse(
            losses=tuple(own), noise=tuple(noise), unstable=tuple(unstable), longest_spike=tuple(longest)
        )


@dataclass(frozen=True, kw_only=True)
class PolicyCourse:
    """The signs of a policy's run after the steps so far; immutable."""

    recent: tuple[float, ...] = ()
    num_steps: int = 0
    ratio: LossRatio = LossRatio()
    spikes: Spikes = Spikes()
    num_unstable: int = 0
    """Consecutive steps with a high loss ratio."""
    num_far: int = 0
    """Consecutive steps far above the reference."""
    sign: str = ""
    """The first sign of divergence; empty while there is none."""

    def with_step(self, loss: float | None, grad_norm: float | None) -> PolicyCourse:
        """After one more step, without a comparison."""
        value = float("nan") if loss is None else loss
        ratio = self.ratio.after(value)
        is_unstable = ratio.newest is None and self.num_steps > 0 or (ratio.newest or 0.0) > UNSTABLE_RATIO
        return replace(
            self,
            recent=(*self.recent, inf if loss is None else loss)[-SMOOTHED_STEPS:],
            num_steps=self.num_steps + 1,
            ratio=ratio,
            spikes=self.spikes.after(float("nan") if grad_norm is None else grad_norm),
            num_unstable=self.num_unstable + 1 if is_unstable else 0,
        )

    def after(self, loss: float | None, grad_norm: float | None, reference: ReferenceCourse) -> PolicyCourse:
        """After one more step next to the reference's; the first sign is kept."""
        step = self.num_steps
        course = self.with_step(loss, grad_norm)
        if self.sign or step >= len(reference.losses):
            return course
        distance = median(course.recent) - reference.losses[step]
        is_far = step >= SMOOTHED_STEPS - 1 and distance > reference.noise[step]
        course = replace(course, num_far=course.num_far + 1 if is_far else 0)
        return replace(course, sign=course._find_sign(step, distance, reference))

    def _find_sign(self, step: int, distance: float, reference: ReferenceCourse) -> str:
        at = f"step {step + 1}"
        if self.num_unstable >= UNSTABLE_STEPS > reference.unstable[step]:
            return f"{at}: the loss is above {UNSTABLE_RATIO:g} times its lowest for {self.num_unstable} steps in a row"
        if self.spikes.length >= max(LONG_SPIKE, 2 * reference.longest_spike[step]) and distance > 0:
            return f"{at}: the gradient norm is in a spike of {self.spikes.length} steps"
        if self.num_far >= FAR_STEPS:
            return (
                f"{at}: the smoothed loss is {distance:.4f} above the reference's, where noise explains "
                f"{reference.noise[step]:.4f}, for {self.num_far} steps"
            )
        return ""


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """The losses and the costs of a policy's runs."""

    name: str
    losses: Mapping[int, float]
    """By seed, of runs that reached their end."""
    sign: str = ""
    """Why a run was stopped; empty if all reached their end."""
    step_s: float | None
    """Of its fastest run, whose own is a median."""
    bytes_per_parameter: float
    """Weights, gradients and optimizer state."""


@dataclass(frozen=True, kw_only=True)
class PolicyJudgement:
    """One policy next to the reference."""

    result: PolicyResult
    comparison: PairedComparison | None
    """None for the reference itself, and without a pair."""
    is_fit: bool
    """Not worse beyond noise."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrecisionVerdict:
    """The policies, and the one to take."""

    reference: str
    margin: float
    judgements: tuple[PolicyJudgement, ...]
    recommended: str | None
    """None if not even the reference reached its end."""
    reason: str


def judge_policies(
    results: Sequence[PolicyResult], reference: str, *, margin: float | None = None, by_memory: bool = False
) -> PrecisionVerdict:
    """Judges all policies. `margin`: nats that do not matter; None: MARGIN_SDS of the reference's seeds."""
    own = next(result for result in results if result.name == reference)
    sd = SeedSpread.of(list(own.losses.values())).sd if own.losses else None
    allowed = margin if margin is not None else MARGIN_SDS * (sd or 0.0)
    judgements = tuple(_judge(result, own, sd, allowed) for result in results)
    fit = [each.result for each in judgements if each.is_fit]
    if not fit:
        reason = f"{reference}, the reference, did not reach its end: {own.sign}"
        return PrecisionVerdict(
            reference=reference, margin=allowed, judgements=judgements, recommended=None, reason=reason
        )
    best = _cheapest(fit, by_memory)
    return PrecisionVerdict(
        reference=reference,
        margin=allowed,
        judgements=judgements,
        recommended=best.name,
        reason=_why(best, next(each for each in judgements if each.result is best), judgements, by_memory),
    )


def _judge(result: PolicyResult, own: PolicyResult, sd: float | None, margin: float) -> PolicyJudgement:
    if result.sign:
        return PolicyJudgement(result=result, comparison=None, is_fit=False, reason=f"stopped at {result.sign}")
    if result is own:
        return PolicyJudgement(result=result, comparison=None, is_fit=True, reason="the reference")
    found = compare_by_seed(own.losses, result.losses)
    if found is None:
        return PolicyJudgement(result=result, comparison=None, is_fit=False, reason="no loss to compare")
    mean = found.spread.mean
    is_certain = found.p is not None and found.p < SIGNIFICANT_P
    is_large = sd is not None and mean > sd
    if mean > margin and (is_certain or is_large):
        why = "a paired t-test finds it" if is_certain else "more than one sd of the reference's seeds"
        return PolicyJudgement(result=result, comparison=found, is_fit=False, reason=f"worse beyond noise: {why}")
    better = "better" if mean < 0 and is_certain else "not worse beyond noise"
    return PolicyJudgement(result=result, comparison=found, is_fit=True, reason=better)


def _cheapest(fit: Sequence[PolicyResult], by_memory: bool) -> PolicyResult:
    if by_memory or any(result.step_s is None for result in fit):
        return min(fit, key=lambda each: (each.bytes_per_parameter, each.step_s or 0.0))
    least = min(each.step_s or 0.0 for each in fit)
    fast = [each for each in fit if (each.step_s or 0.0) <= SAME_COST * least]
    return min(fast, key=lambda each: (each.bytes_per_parameter, each.step_s or 0.0))


def _why(best: PolicyResult, own: PolicyJudgement, judgements: Sequence[PolicyJudgement], by_memory: bool) -> str:
    others = [each for each in judgements if each.result is not best]
    speed = f"{1e3 * best.step_s:.0f} ms a step, " if best.step_s is not None else ""
    what, size = "bytes" if by_memory else "time, within 5 %,", f"{best.bytes_per_parameter:g} bytes a parameter"
    text = f"{best.name}: the least {what} of those not worse beyond noise ({speed}{size})"
    if own.comparison is not None:
        text += f"; its loss differs by {own.comparison.spread.mean:+.4f} nats a token from the reference's"
    unfit = [each.result.name for each in others if not each.is_fit]
    return f"{text}; left out: {', '.join(unfit)}" if unfit else text
