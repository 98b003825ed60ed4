"""Entries: the numbered results of an iteration's one all-reduce, and the state that is a fold over them. Pure.

Every rank adds its part to one vector of float64; the sum, the same on all ranks, is the entry. Nothing outside of an
iteration's scratch changes before its entry is held, and folding an entry twice changes nothing.

    slot of the vector     who adds to it
    squared gradient norm  every rank, its owned elements of the model
    non-finite             every rank: 1 if its owned gradients hold an infinity or a NaN
    target tokens, loss    the last stage of each micro-batch's route, tensor-parallel rank 0
    stop                   every rank that was asked to stop
    cursors                the first stage of each micro-batch's route, tensor-parallel rank 0, for its slots
    audit                  each (stage, micro-batch): the replica that ran its backward pass, so that it must be 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt

from parallel3d.data.lanes import Cursor
from parallel3d.errors import ProtocolError

_SCALARS = ("squared_norm", "non_finite", "num_target_tokens", "loss_sum", "stop")


@dataclass(kw_only=True)
class Contribution:
    """One rank's part of an entry."""

    squared_norm: float = 0.0
    num_target_tokens: int = 0
    loss_sum: float = 0.0
    stop: bool = False
    cursors: Mapping[int, Cursor] = field(default_factory=dict)
    audit: Mapping[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What all ranks know of iteration `iteration` once it is over; gradients are sums over tokens until divided."""

    iteration: int
    squared_norm: float
    finite: bool
    num_target_tokens: int
    loss_sum: float
    stop: bool
    cursors: tuple[Cursor, ...]

    @property
    def loss(self) -> float:
        """Mean loss of a target token, in nats."""
        return self.loss_sum / self.num_target_tokens

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient of the mean loss, before clipping."""
        return sqrt(self.squared_norm) / self.num_target_tokens

    def grad_scale(self, max_grad_norm: float | None) -> float:
        """The factor that turns a sum of token gradients into the clipped gradient of the mean loss."""
        scale = 1.0 / self.num_target_tokens
        if max_grad_norm is None:
            return scale
        return scale * min(1.0, max_grad_norm / (self.grad_norm + 1e-6))


@dataclass(frozen=True, kw_only=True)
class EntryLayout:
    """Where everything stands in the vector."""

    num_stages: int
    num_micro_batches: int
    num_slots: int

    @property
    def size(self) -> int:
        return len(_SCALARS) + self.num_slots * Cursor.NUM_INTS + self.num_stages * self.num_micro_batches

    def pack(self, part: Contribution) -> list[float]:
        """One rank's vector. A norm that is not finite travels as a flag."""
        finite = isfinite(part.squared_norm) and isfinite(part.loss_sum)
        vector = [0.0] * self.size
        vector[: len(_SCALARS)] = [
            part.squared_norm if finite else 0.0,
            0.0 if finite else 1.0,
            float(part.num_target_tokens),
            part.loss_sum,
            float(part.stop),
        ]
        for slot, cursor in part.cursors.items():
            start = self._cursor(slot)
            vector[start : start + Cursor.NUM_INTS] = map(float, cursor.to_ints())
        for (stage, micro_batch), count in part.audit.items():
            vector[self._audit(stage, micro_batch)] = float(count)
        return vector

    def unpack(self, iteration: int, total: list[float]) -> Entry:
        """The entry from the sum of all vectors; ProtocolError when the audit fails."""
        for stage in range(self.num_stages):
            for micro_batch in range(self.num_micro_batches):
                count = total[self._audit(stage, micro_batch)]
                if count != 1.0:
                    raise ProtocolError(
                        f"iteration {iteration}: micro-batch {micro_batch} counted {count:g} times at stage {stage}"
                    )
        squared_norm, non_finite, num_target_tokens, loss_sum, stop = total[: len(_SCALARS)]
        return Entry(
            iteration=iteration,
            squared_norm=squared_norm,
            finite=non_finite == 0,
            num_target_tokens=int(num_target_tokens),
            loss_sum=loss_sum,
            stop=stop > 0,
            cursors=tuple(
                Cursor.from_ints([int(x) for x in total[self._cursor(s) : self._cursor(s) + Cursor.NUM_INTS]])
                for s in range(self.num_slots)
            ),
        )

    def _cursor(self, slot: int) -> int:
        return len(_SCALARS) + slot * Cursor.NUM_INTS

    def _audit(self, stage: int, micro_batch: int) -> int:
        return self._cursor(self.num_slots) + stage * self.num_micro_batches + micro_batch


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a run knows besides its weights and moments: a fold over its entries."""

    iteration: int = 0
    """Entries folded; keys data and noise."""
    num_updates: int = 0
    """Updates applied; drives the schedules. A non-finite gradient makes an iteration without an update."""
    tokens_read: int = 0
    tokens_trained: int = 0
    cursors: tuple[Cursor, ...] = ()
    entries: tuple[Entry, ...] = ()
    """The last two."""

    @staticmethod
    def start(num_slots: int) -> TrainState:
        return TrainState(cursors=(Cursor.start(),) * num_slots)

    def fold(self, entry: Entry) -> TrainState:
        """The state after `entry`; the same state when it has been folded already."""
        if entry.iteration <= self.iteration:
            return self
        assert entry.iteration == self.iteration + 1, f"entry {entry.iteration} after {self.iteration}"
        return replace(
            self,
            iteration=entry.iteration,
            num_updates=self.num_updates + entry.finite,
            tokens_read=self.tokens_read + entry.num_target_tokens,
            tokens_trained=self.tokens_trained + entry.num_target_tokens * entry.finite,
            cursors=entry.cursors,
            entries=(*self.entries, entry)[-2:],
        )
