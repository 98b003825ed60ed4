"""Throughput over the last steps, and when an evaluation with a share of the time is due. Pure: times are passed in.

The next evaluation is due as soon as it takes at most its share of the time since the last one ended, itself included::

    |--- steps: s seconds ---|- evaluation: e -|        due when e <= share * (s + e)

e is the time of the last evaluation; before the first it is estimated from the steps, a forward pass being a third of
one. Clocks differ between ranks, so the leader decides, and its decision travels in the step's all-reduce.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil

WINDOW = 10
"""Steps of the moving window (HLAT)."""
FORWARD_SHARE = 1 / 3
MIN_STEPS = 2
"""The first step is slower than the others: memory is touched and kernels are built for the first time."""


class MovingThroughput:
    """Tokens and sequences per second over the last WINDOW steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=WINDOW)

    def record(self, *, num_tokens: int, num_sequences: int, step_s: float) -> None:
        self._steps.append((num_tokens, num_sequences, step_s))

    @property
    def tokens_per_s(self) -> float:
        return self._rate(0)

    @property
    def full_tokens_per_s(self) -> float:
        """0 before WINDOW steps, which are too few to compare."""
        return self._rate(0) if len(self._steps) == WINDOW else 0.0

    @property
    def sequences_per_s(self) -> float:
        return self._rate(1)

    def _rate(self, column: int) -> float:
        seconds = sum(step[2] for step in self._steps)
        return sum(step[column] for step in self._steps) / seconds if seconds else 0.0


@dataclass(kw_only=True)
class EvaluationInterval:
    """Decides when an evaluation of `num_batches` global batches may take `share` of the time; None means never."""

    share: float | None
    num_batches: int
    num_steps: int = 0
    """Steps since the last evaluation."""
    training_s: float = 0.0
    step_s: float = 0.0
    """Seconds of the newest step."""
    evaluation_s: float | None = None
    """Seconds of the last evaluation; None before the first."""

    def record_step(self, seconds: float) -> None:
        self.num_steps, self.training_s, self.step_s = self.num_steps + 1, self.training_s + seconds, seconds

    def record_evaluation(self, seconds: float) -> None:
        self.num_steps, self.training_s, self.evaluation_s = 0, 0.0, seconds

    @property
    def is_due(self) -> bool:
        """Whether an evaluation should follow the next step."""
        if self.share is None or self.num_steps < MIN_STEPS:
            return False
        guess = FORWARD_SHARE * self.num_batches * self.step_s
        expected = guess if self.evaluation_s is None else self.evaluation_s
        return expected <= self.share * (self.training_s + expected)


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """How often to evaluate, on how many global batches, how long each takes, and what all of them add to the run."""

    every: int
    num_batches: int
    evaluation_s: float
    num_evaluations: int
    share: float
    """Seconds of all evaluations / seconds of all steps."""


def plan_evaluations(
    *, num_steps: int, step_s: float, batch_s: float, share: float, num_evaluations: int = 50
) -> EvaluationPlan | None:
    """Evaluations of a run of `num_steps` that together take at most `share` of the training's time.

    As many as `num_evaluations` if one batch each fits into the share; fewer in shorter runs; None when not even one
    fits. `step_s` and `batch_s` are measured: seconds of a step, and of a batch in an evaluation.
    """
    affordable_steps = ceil(batch_s / (share * step_s) - 1e-9)  # steps that pay for one batch
    every = max(1, round(num_steps / num_evaluations), affordable_steps)
    if every > num_steps:
        return None
    batches = max(1, int(share * every * step_s / batch_s + 1e-9))
    count, evaluation_s = num_steps // every, batches * batch_s
    return EvaluationPlan(
        every=every,
        num_batches=batches,
        evaluation_s=evaluation_s,
        num_evaluations=count,
        share=count * evaluation_s / (num_steps * step_s),
    )
