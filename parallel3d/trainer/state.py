"""The state of training: everything a run knows besides weights and optimizer state. Pure.

It follows from the entries applied so far, in order; applying an entry twice changes nothing. Ranks that hold the same
entries therefore hold the same state, and a rank that missed one catches up by applying it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel3d.data.reader import LaneCursor
from parallel3d.monitor.training_monitor import NEW_MONITOR, TrainingMonitor
from parallel3d.pipeline.slow_replicas import NORMAL_SPEEDS, ReplicaSpeeds
from parallel3d.precision.loss_scale import UNSCALED, LossScale
from parallel3d.size_schedule import CONSTANT_SHAPE, BatchShape, BatchShapeSchedule
from parallel3d.trainer.entry import Entry, EvaluationEntry


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The sum of a run's entries; immutable."""

    iteration: int = 0
    """Entries applied; keys data and noise."""
    num_updates: int = 0
    """Updates applied; drives the schedules. An iteration with a non-finite gradient has no update."""
    tokens_read: int = 0
    """Tokens consumed from the lanes, dropped tails included: the position in the text."""
    tokens_dropped: int = 0
    """Those of them that were skipped, because sequences were shorter or because the run had diverged on them."""
    tokens_trained: int = 0
    """Target tokens of all updates: the clock of learning rates by tokens."""
    cursors: Sequence[LaneCursor] = ()
    entries: tuple[Entry, ...] = ()
    """The last two entries."""
    evaluations: tuple[EvaluationEntry, ...] = ()
    """The last evaluation, if any."""
    loss_scale: LossScale = UNSCALED
    """The loss scale of the next iteration."""
    monitor: TrainingMonitor = NEW_MONITOR
    """Stability figures of the run so far."""
    speeds: ReplicaSpeeds = NORMAL_SPEEDS
    """Which replicas are slow."""
    shape_schedule: BatchShapeSchedule = CONSTANT_SHAPE
    """Gives the shape of each iteration's batch."""

    @property
    def shape(self) -> BatchShape:
        """Shape of the next iteration's batch."""
        return self.shape_schedule.shape(self.iteration, self.tokens_seen)

    @property
    def tokens_seen(self) -> int:
        """Target tokens of all iterations, with or without an update: the clock of `run.num_tokens`."""
        return self.tokens_read - self.tokens_dropped

    @property
    def is_evaluated(self) -> bool:
        """Whether the evaluation after the newest iteration has been applied."""
        return any(evaluation.iteration == self.iteration for evaluation in self.evaluations)

    @property
    def newest(self) -> tuple[Entry | EvaluationEntry, ...]:
        """The entries that a rank one iteration behind lacks."""
        return (*self.entries[-1:], *(self.evaluations if self.is_evaluated else ()))

    def apply(self, entry: Entry | EvaluationEntry) -> TrainState:
        """The state after `entry`; this state unchanged if the entry was applied before."""
        if isinstance(entry, EvaluationEntry):
            assert entry.iteration <= self.iteration, f"evaluation {entry.iteration} after entry {self.iteration}"
            if entry.iteration < self.iteration or self.is_evaluated:
                return self
            return replace(self, evaluations=(entry,), shape_schedule=self.shape_schedule.after_evaluation(entry.loss))
        if entry.iteration <= self.iteration:
            return self
        assert entry.iteration == self.iteration + 1, f"entry {entry.iteration} after {self.iteration}"
        return replace(
            self,
            iteration=entry.iteration,
            num_updates=self.num_updates + (1 if entry.finite else 0),
            tokens_read=self.tokens_read + entry.num_target_tokens + self.shape.num_dropped_tokens,
            tokens_dropped=self.tokens_dropped + self.shape.num_dropped_tokens,
            tokens_trained=self.tokens_trained + (entry.num_target_tokens if entry.finite else 0),
            cursors=entry.cursors
            if len(entry.cursors) >= len(self.cursors)
            else (*entry.cursors, *self.cursors[len(entry.cursors) :]),
            entries=(*self.entries, entry)[-2:],
            loss_scale=self.loss_scale.after(finite=entry.finite),
            monitor=self.monitor.after(entry.metrics),
            shape_schedule=self.shape_schedule.after_step(entry.variance_max),
            speeds=self.speeds.after({(stage, worker): time for stage, worker, time in entry.unit_times}),
        )
