"""Entries: the numbered results of an iteration's one all-reduce, and the state that is a fold over them. Pure.

Every rank adds its part to one vector of float64; the sum, the same on all ranks, is the entry. Nothing outside of an
iteration's scratch changes before its entry is held, and folding an entry twice changes nothing.

    slot of the vector     who adds to it
    squared gradient norm  every rank, its owned elements of the model
    non-finite             every rank: 1 if its owned gradients hold an infinity or a NaN
    target tokens, loss    the last stage of each micro-batch's route, tensor-parallel rank 0
    stop, leave            every rank that was asked to stop the run, or to leave it
    evaluate               the leader, where its clock says that an evaluation is due
    saved, not saved       every rank whose part of the save under way is on disk, or can't be written
    cursors                the first stage of each micro-batch's route, tensor-parallel rank 0, for its slots
    audit                  each (virtual stage, micro-batch): the replica that ran its backward pass: it must be 1
    norms                  where they are measured: every rank, its owned elements of weights and second moments as they
                           are before this iteration's update; of the largest each rank has a slot of its own
    replica check          where one is due: every rank, to the words of its stage (debug/replicas.py)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import isfinite, sqrt
from typing import Any

from parallel3d.data.reader import LaneCursor
from parallel3d.debug.replica_check import NUM_CHECKSUMS, has_difference
from parallel3d.errors import ProtocolError
from parallel3d.monitor.training_monitor import NEW_MONITOR, StepMetrics, TrainingMonitor
from parallel3d.optim.state_norms import StateNorms, larger
from parallel3d.precision.fixed_point import NUM_FLOATS, ExactSum
from parallel3d.precision.loss_scale import UNSCALED, LossScale
from parallel3d.size_schedule import CONSTANT_SHAPE, BatchShape, BatchShapeSchedule

Json = dict[str, Any]

_SUMS = ("squared_norm", "loss_sum")  # exact: the same in whatever order micro-batches and ranges are added
_SCALARS = ("non_finite", "num_target_tokens", "stop", "leave", "num_saved", "num_not_saved", "evaluate")


@dataclass(frozen=True, kw_only=True)
class SaveStatus:
    """What one rank says of its part of the save under way; neither: still at it, or there is none."""

    is_on_disk: bool = False
    has_failed: bool = False


NO_SAVE_STATUS = SaveStatus()


@dataclass(kw_only=True)
class Contribution:
    """One rank's part of an entry."""

    squared_norm: ExactSum = ExactSum()
    is_finite: bool = True
    num_target_tokens: int = 0
    loss_sum: ExactSum = ExactSum()
    stop: bool = False
    leave: bool = False
    evaluate: bool = False
    save_status: SaveStatus = NO_SAVE_STATUS
    cursors: Mapping[int, LaneCursor] = field(default_factory=dict)
    backward_counts: Mapping[tuple[int, int], int] = field(default_factory=dict)
    norms: StateNorms | None = None
    """None where they are not measured, on all ranks alike."""
    rank: int = 0
    """Whose part it is: its number in the run's first grid."""
    replica_check: Mapping[int, Sequence[int]] | None = None
    """Words of the replica check by stage; None where none is due, on all ranks alike."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What all ranks know of iteration `iteration` once it is over; gradients are sums over tokens until divided."""

    iteration: int
    squared_norm: float
    finite: bool
    num_target_tokens: int
    loss_sum: float
    stop: bool
    leave: bool
    """Somebody departs: the membership changes after this iteration."""
    cursors: tuple[LaneCursor, ...]
    """Of the slots that the iteration had."""
    differing_stages: tuple[int, ...] = ()
    """Stages where the replica check has found copies that differ."""
    num_saved: int = 0
    """Ranks whose part of the save under way is on disk."""
    num_not_saved: int = 0
    """Ranks that can't write theirs."""
    evaluate: bool = False
    """An evaluation is due by the leader's clock: it follows this iteration."""
    param_norm: float | None = None
    """l2 norm of all weights with which the iteration began; None where it was not measured, as the next two."""
    variance_norm: float | None = None
    """l1 norm of Adam's sqrt(v) then."""
    variance_max: float | None = None
    """The largest element of sqrt(v) then."""

    @property
    def loss(self) -> float:
        """Mean loss of a target token, in nats."""
        return self.loss_sum / self.num_target_tokens

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient of the mean loss, before clipping."""
        return sqrt(self.squared_norm) / self.num_target_tokens

    @property
    def metrics(self) -> StepMetrics:
        """What the monitors are told."""
        return StepMetrics(
            loss=self.loss,
            grad_norm=self.grad_norm if self.finite else None,
            param_norm=self.param_norm,
            variance_norm=self.variance_norm,
            variance_max=self.variance_max,
        )

    def grad_scale(self, max_grad_norm: float | None) -> float:
        """The factor that turns a sum of token gradients into the clipped gradient of the mean loss."""
        scale = 1.0 / self.num_target_tokens
        if max_grad_norm is None:
            return scale
        return scale * min(1.0, max_grad_norm / (self.grad_norm + 1e-6))

    def to_json(self) -> Json:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "kind": "iteration", "cursors": [list(cursor) for cursor in self.cursors]}

    @staticmethod
    def from_json(data: Json) -> Entry:
        fields = {key: value for key, value in data.items() if key != "kind"}
        cursors = tuple(tuple(cursor) for cursor in data["cursors"])
        return Entry(**{**fields, "cursors": cursors, "differing_stages": tuple(data["differing_stages"])})


@dataclass(frozen=True, kw_only=True)
class EvaluationEntry:
    """What all ranks know once the evaluation after iteration `iteration` is over."""

    iteration: int
    loss: float | None
    """Mean loss of a token of the validation text, in nats; None where there is no such text."""

    def to_json(self) -> Json:
        return {"kind": "evaluation", "iteration": self.iteration, "loss": self.loss}

    @staticmethod
    def from_json(data: Json) -> EvaluationEntry:
        return EvaluationEntry(iteration=data["iteration"], loss=data["loss"])


def entry_from_json(data: Json) -> Entry | EvaluationEntry:
    return EvaluationEntry.from_json(data) if data["kind"] == "evaluation" else Entry.from_json(data)


@dataclass(frozen=True, kw_only=True)
class EntryLayout:
    """Where everything stands in the vector."""

    num_stages: int
    """Virtual stages: each chunk of layers has one backward pass of every micro-batch."""
    num_micro_batches: int
    num_slots: int
    cursor_size: int
    """Integers of a lane's cursor."""
    num_ranks: int = 0
    """Of the run's first grid, where norms of weights and second moments have places; 0: they have none."""

    @property
    def size(self) -> int:
        """Without the replica check, which is not in every vector."""
        return self._maxima_offset + self.num_ranks if self.num_ranks else self._norms_offset

    def pack(self, part: Contribution) -> list[float]:
        """One rank's vector. A norm or loss that is not finite travels as a flag."""
        finite = part.is_finite and isfinite(part.squared_norm.value) and isfinite(part.loss_sum.value)
        vector = [0.0] * self.size
        vector[: self._cursor_offset(0)] = [
            *(part.squared_norm if finite else ExactSum(units=part.squared_norm.units)).to_floats(),
            *part.loss_sum.to_floats(),
            0.0 if finite else 1.0,
            float(part.num_target_tokens),
            float(part.stop),
            float(part.leave),
            float(part.save_status.is_on_disk),
            float(part.save_status.has_failed),
            float(part.evaluate),
        ]
        for slot, cursor in part.cursors.items():
            start = self._cursor_offset(slot)
            vector[start : start + self.cursor_size] = map(float, cursor)
        for (stage, micro_batch), count in part.backward_counts.items():
            vector[self._backward_count_offset(stage, micro_batch)] = float(count)
        if part.norms is not None:
            sums = (1.0, *part.norms.squared_weights.to_floats(), *part.norms.variance.to_floats())
            vector[self._norms_offset : self._norms_offset + len(sums)] = sums
            vector[self._maxima_offset + part.rank] = part.norms.variance_max
        if part.replica_check is not None:
            none = (0,) * NUM_CHECKSUMS
            vector += [float(word) for stage in range(self.num_stages) for word in part.replica_check.get(stage, none)]
        return vector

    def unpack(self, iteration: int, total: list[float]) -> Entry:
        """The entry from the sum of all vectors; ProtocolError when the audit fails."""
        for stage in range(self.num_stages):
            for micro_batch in range(self.num_micro_batches):
                count = total[self._backward_count_offset(stage, micro_batch)]
                if count != 1.0:
                    raise ProtocolError(
                        f"iteration {iteration}: micro-batch {micro_batch} counted {count:g} times at stage {stage}"
                    )
        squared_norm, loss_sum = (
            ExactSum.from_floats(total[number * NUM_FLOATS : (number + 1) * NUM_FLOATS]).value
            for number in range(len(_SUMS))
        )
        non_finite, num_target_tokens, stop, leave, num_saved, num_not_saved, evaluate = total[
            len(_SUMS) * NUM_FLOATS : self._cursor_offset(0)
        ]
        return Entry(
            iteration=iteration,
            squared_norm=squared_norm,
            finite=non_finite == 0,
            num_target_tokens=int(num_target_tokens),
            loss_sum=loss_sum,
            stop=stop > 0,
            leave=leave > 0,
            num_saved=int(num_saved),
            num_not_saved=int(num_not_saved),
            evaluate=evaluate > 0,
            **self._unpack_norms(total),
            cursors=tuple(
                tuple(int(number) for number in total[self._cursor_offset(slot) : self._cursor_offset(slot + 1)])
                for slot in range(self.num_slots)
            ),
            differing_stages=tuple(
                stage for stage, words in enumerate(self._checksums_by_stage(total)) if has_difference(words)
            ),
        )

    def _unpack_norms(self, total: list[float]) -> dict[str, float]:
        """The entry's norms, if they were measured."""
        if not self.num_ranks or total[self._norms_offset] == 0.0:
            return {}
        sums = total[self._norms_offset + 1 : self._maxima_offset]
        squared_weights, variance = (
            ExactSum.from_floats(sums[start : start + NUM_FLOATS]) for start in (0, NUM_FLOATS)
        )
        return {
            "param_norm": sqrt(squared_weights.value),
            "variance_norm": variance.value,
            "variance_max": reduce(larger, total[self._maxima_offset : self.size]),
        }

    def _checksums_by_stage(self, total: list[float]) -> list[list[float]]:
        """The words of the replica check by stage, if one was due."""
        words = total[self.size :]
        return [words[start : start + NUM_CHECKSUMS] for start in range(0, len(words), NUM_CHECKSUMS)]

    def _cursor_offset(self, slot: int) -> int:
        return len(_SUMS) * NUM_FLOATS + len(_SCALARS) + slot * self.cursor_size

    def _backward_count_offset(self, stage: int, micro_batch: int) -> int:
        return self._cursor_offset(self.num_slots) + stage * self.num_micro_batches + micro_batch

    @property
    def _norms_offset(self) -> int:
        """How many ranks have measured, and their sums."""
        return self._backward_count_offset(self.num_stages, 0)

    @property
    def _maxima_offset(self) -> int:
        """What each rank has found the largest."""
        return self._norms_offset + 1 + 2 * NUM_FLOATS


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a run knows besides its weights and moments: a fold over its entries."""

    iteration: int = 0
    """Entries folded; keys data and noise."""
    num_updates: int = 0
    """Updates applied; drives the schedules. A non-finite gradient makes an iteration without an update."""
    tokens_read: int = 0
    """Consumed from the lanes, dropped tails of sequences included: what the text's order goes by."""
    tokens_dropped: int = 0
    """Of these: left out, since sequences were shorter, or the run had diverged on them."""
    tokens_trained: int = 0
    """Target tokens of all updates: what learning rates by tokens go by."""
    cursors: tuple[LaneCursor, ...] = ()
    entries: tuple[Entry, ...] = ()
    """The last two."""
    evaluations: tuple[EvaluationEntry, ...] = ()
    """The last one, if any."""
    loss_scale: LossScale = UNSCALED
    """Of the next iteration."""
    monitor: TrainingMonitor = NEW_MONITOR
    """What the monitors know of the run's course."""
    shape_schedule: BatchShapeSchedule = CONSTANT_SHAPE
    """What makes the shape of each iteration's batch."""

    @staticmethod
    def start(
        cursors: tuple[LaneCursor, ...],
        loss_scale: LossScale = UNSCALED,
        monitor: TrainingMonitor = NEW_MONITOR,
        shape_schedule: BatchShapeSchedule = CONSTANT_SHAPE,
    ) -> TrainState:
        return TrainState(cursors=cursors, loss_scale=loss_scale, monitor=monitor, shape_schedule=shape_schedule)

    @property
    def shape(self) -> BatchShape:
        """Of the next iteration's batch."""
        return self.shape_schedule.shape(self.iteration, self.tokens_seen)

    @property
    def tokens_seen(self) -> int:
        """Target tokens of all iterations, with an update or without: what the run's length goes by."""
        return self.tokens_read - self.tokens_dropped

    @property
    def is_evaluated(self) -> bool:
        """Whether the evaluation after the newest iteration is held."""
        return any(evaluation.iteration == self.iteration for evaluation in self.evaluations)

    @property
    def newest(self) -> tuple[Entry | EvaluationEntry, ...]:
        """The entries that a rank which is one behind lacks."""
        return (*self.entries[-1:], *(self.evaluations if self.is_evaluated else ()))

    def apply(self, entry: Entry | EvaluationEntry) -> TrainState:
        """The state after `entry`; the same state when it has been folded already."""
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
            num_updates=self.num_updates + entry.finite,
            tokens_read=self.tokens_read + entry.num_target_tokens + self.shape.num_dropped_tokens,
            tokens_dropped=self.tokens_dropped + self.shape.num_dropped_tokens,
            tokens_trained=self.tokens_trained + entry.num_target_tokens * entry.finite,
            cursors=(*entry.cursors, *self.cursors[len(entry.cursors) :]),
            entries=(*self.entries, entry)[-2:],
            loss_scale=self.loss_scale.after(finite=entry.finite),
            monitor=self.monitor.after(entry.metrics),
        )
