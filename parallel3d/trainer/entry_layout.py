"""The vector of float64 that carries an entry through the all-reduce. Pure.

part of the vector       who adds to it
squared gradient norm    every rank: its owned elements of the model (exact sum)
loss                     tensor-parallel rank 0 of the last stage of each micro-batch's route (exact sum)
non-finite               every rank: 1 if its owned gradients hold an infinity or a NaN
target tokens            as the loss
stop, leave              every rank that was asked to stop the run, or to leave it
saved, not saved         every rank whose part of the current save is on disk, or can't be written
evaluate                 the leader, when its clock says that an evaluation is due
cursors                  tensor-parallel rank 0 of the first stage of each micro-batch's route, for its slots
audit                    each (virtual stage, micro-batch): the replica that ran its backward pass; must be 1
norms                    in iterations that measure them, every rank: its owned elements of weights and second
                         moments as they are before the update; each rank has its own place for its largest one
replica check            in iterations that have one, every rank: checksums of its stage (debug/replica_check.py)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from math import isfinite, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parallel3d.debug.replica_check import NUM_CHECKSUMS, has_difference
from parallel3d.errors import ProtocolError
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.optim.state_norms import larger
from parallel3d.precision.fixed_point import NUM_FLOATS, ExactSum
from parallel3d.trainer.entry import Contribution, Entry, UnitTime
from parallel3d.trainer.lane_cursors import LaneCursors

Vector = NDArray[np.float64]

_SUMS = ("squared_norm", "loss_sum")  # exact: the same in whatever order micro-batches and ranges are added
_SCALARS = (
    "non_finite",
    "num_target_tokens",
    "num_masked_tokens",
    "stop",
    "leave",
    "num_saved",
    "num_not_saved",
    "evaluate",
)


@dataclass(frozen=True, kw_only=True)
class EntryLayout:
    """Offsets of all parts in the vector."""

    num_stages: int
    """Number of virtual stages: each runs one backward pass of every micro-batch."""
    num_micro_batches: int
    num_slots: int
    cursor_size: int
    """Number of integers in a lane's cursor."""
    num_ranks: int = 0
    """Ranks of the run's first grid if norms of weights and second moments are measured; else 0: no space for them."""
    has_variance: bool = True
    """Whether the update rule keeps second moments; if not, only the weights are measured."""

    def for_batch(self, batch: BatchPlan) -> EntryLayout:
        """The layout of that batch's entry: warmups change the number of micro-batches and slots."""
        return replace(self, num_micro_batches=batch.num_micro_batches, num_slots=batch.num_slots)

    @property
    def size(self) -> int:
        """Length without the replica check, which not every vector has."""
        return self._maxima_offset + self.num_ranks if self.num_ranks else self._norms_offset

    def pack(self, part: Contribution) -> Vector:
        """One rank's vector. A non-finite norm or loss travels as a flag: a NaN would erase the other ranks' parts."""
        # The ranks' vectors are added once, and the sum must mean the same on every layout. So each number has either
        # one rank that contributes it (cursors, counts, losses) or parts that add up exactly in any order: exact sums,
        # and flags and counts far below 2^53. All other positions stay zero. A maximum can't be added; hence a position
        # for each rank.
        finite = part.is_finite and isfinite(part.squared_norm.value) and isfinite(part.loss_sum.value)
        vector = np.zeros(self.size)
        vector[: self._cursor_offset(0)] = [
            *(part.squared_norm if finite else ExactSum(units=part.squared_norm.units)).to_floats(),
            *part.loss_sum.to_floats(),
            0.0 if finite else 1.0,
            float(part.num_target_tokens),
            float(part.num_masked_tokens),
            float(part.stop),
            float(part.leave),
            float(part.save_status.is_on_disk),
            float(part.save_status.has_failed),
            float(part.evaluate),
        ]
        if part.cursors:
            self._cursors(vector)[list(part.cursors)] = list(part.cursors.values())
        if part.backward_counts:
            stages, micro_batches = zip(*part.backward_counts)
            self._backward_counts(vector)[stages, micro_batches] = list(part.backward_counts.values())
        if part.norms is not None:
            sums = (1.0, *part.norms.squared_weights.to_floats(), *part.norms.variance.to_floats())
            vector[self._norms_offset : self._norms_offset + len(sums)] = sums
            vector[self._maxima_offset + part.rank] = part.norms.variance_max
        if part.replica_check is not None:
            none = (0,) * NUM_CHECKSUMS
            words = [word for stage in range(self.num_stages) for word in part.replica_check.get(stage, none)]
            return np.concatenate((vector, np.array(words, dtype=np.float64)))
        return vector

    def unpack(self, iteration: int, total: ArrayLike, unit_times: tuple[UnitTime, ...] = ()) -> Entry:
        """The entry from the sum of all vectors, and replicas' times. Raises ProtocolError when the audit fails."""
        vector = np.asarray(total, dtype=np.float64)
        self._audit(iteration, vector)
        squared_norm, loss_sum = (
            ExactSum.from_floats(vector[number * NUM_FLOATS : (number + 1) * NUM_FLOATS].tolist()).value
            for number in range(len(_SUMS))
        )
        non_finite, num_target_tokens, num_masked_tokens, stop, leave, num_saved, num_not_saved, evaluate = vector[
            len(_SUMS) * NUM_FLOATS : self._cursor_offset(0)
        ].tolist()
        return Entry(
            iteration=iteration,
            squared_norm=squared_norm,
            finite=non_finite == 0,
            num_target_tokens=int(num_target_tokens),
            num_masked_tokens=int(num_masked_tokens),
            loss_sum=loss_sum,
            stop=stop > 0,
            leave=leave > 0,
            num_saved=int(num_saved),
            num_not_saved=int(num_not_saved),
            evaluate=evaluate > 0,
            **self._unpack_norms(vector),
            cursors=LaneCursors(self._cursors(vector).astype(np.int64)),
            differing_stages=tuple(
                stage for stage, words in enumerate(self._checksums_by_stage(vector)) if has_difference(words)
            ),
            unit_times=unit_times,
        )

    def _audit(self, iteration: int, total: Vector) -> None:
        """Raises ProtocolError unless each micro-batch had exactly one backward pass at each virtual stage."""
        counts = self._backward_counts(total)
        for stage, micro_batch in np.argwhere(counts != 1.0)[:1].tolist():
            count = counts[stage, micro_batch]
            raise ProtocolError(
                f"iteration {iteration}: micro-batch {micro_batch} counted {count:g} times at stage {stage}"
            )

    def _unpack_norms(self, total: Vector) -> dict[str, float]:
        """The entry's norms; {} if they were not measured."""
        if not self.num_ranks or total[self._norms_offset] == 0.0:
            return {}
        sums = total[self._norms_offset + 1 : self._maxima_offset].tolist()
        squared_weights, variance = (
            ExactSum.from_floats(sums[start : start + NUM_FLOATS]) for start in (0, NUM_FLOATS)
        )
        if not self.has_variance:
            return {"param_norm": sqrt(squared_weights.value)}
        return {
            "param_norm": sqrt(squared_weights.value),
            "variance_norm": variance.value,
            "variance_max": reduce(larger, total[self._maxima_offset : self.size].tolist()),
        }

    def _checksums_by_stage(self, total: Vector) -> list[list[float]]:
        """Checksums of the replica check by stage; [] without one."""
        words = total[self.size :].tolist()
        return [words[start : start + NUM_CHECKSUMS] for start in range(0, len(words), NUM_CHECKSUMS)]

    def _cursors(self, vector: Vector) -> Vector:
        """A view of the cursors, a row for each slot."""
        return vector[self._cursor_offset(0) : self._cursor_offset(self.num_slots)].reshape(-1, self.cursor_size)

    def _backward_counts(self, vector: Vector) -> Vector:
        """A view of the counts, a row for each virtual stage."""
        counts = vector[self._cursor_offset(self.num_slots) : self._norms_offset]
        return counts.reshape(self.num_stages, self.num_micro_batches)

    def _cursor_offset(self, slot: int) -> int:
        return len(_SUMS) * NUM_FLOATS + len(_SCALARS) + slot * self.cursor_size

    @property
    def _norms_offset(self) -> int:
        """Offset of the number of ranks that measured, followed by their two sums."""
        return self._cursor_offset(self.num_slots) + self.num_stages * self.num_micro_batches

    @property
    def _maxima_offset(self) -> int:
        """Offset of each rank's largest element."""
        return self._norms_offset + 1 + 2 * NUM_FLOATS
