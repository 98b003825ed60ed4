"""Entries: the numbered results of an iteration's one all-reduce, and the parts that the ranks add to them. Pure.

Every rank adds its `Contribution` to one vector (entry_layout.py); the sum, the same on all ranks, is the `Entry`. The
state of training follows from the entries alone (state.py). Apart from an iteration's scratch memory, nothing changes
before its entry is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from parallel3d.data.reader import LaneCursor
from parallel3d.monitor.training_monitor import StepMetrics
from parallel3d.optim.state_norms import StateNorms
from parallel3d.precision.fixed_point import ExactSum

Json = dict[str, Any]
UnitTime = tuple[int, int, float]
"""Stage and newest worker of a replica, and its seconds for a token; 0 without work."""


@dataclass(frozen=True, kw_only=True)
class SaveStatus:
    """Status of this rank's part of the current save; both false while it is in progress or when there is none."""

    is_on_disk: bool = False
    has_failed: bool = False


NO_SAVE_STATUS = SaveStatus()


@dataclass(kw_only=True)
class Contribution:
    """One rank's part of an entry."""

    squared_norm: ExactSum = ExactSum()
    is_finite: bool = True
    num_target_tokens: int = 0
    num_masked_tokens: int = 0
    loss_sum: ExactSum = ExactSum()
    stop: bool = False
    leave: bool = False
    evaluate: bool = False
    save_status: SaveStatus = NO_SAVE_STATUS
    cursors: Mapping[int, LaneCursor] = field(default_factory=dict)
    backward_counts: Mapping[tuple[int, int], int] = field(default_factory=dict)
    norms: StateNorms | None = None
    """None in iterations that do not measure them; the same ones on all ranks."""
    rank: int = 0
    """Its number among the ranks of the grid."""
    replica_check: Mapping[int, Sequence[int]] | None = None
    """Checksums of the replica check by stage; None in iterations without one; the same ones on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The result of one iteration, the same on all ranks; sums run over tokens with a loss until they are divided."""

    iteration: int
    squared_norm: float
    finite: bool
    num_target_tokens: int
    """Tokens of the sequences, with or without a loss: what the run's clock counts."""
    loss_sum: float
    stop: bool
    leave: bool
    """A worker asked to leave: the membership changes after this iteration."""
    cursors: Sequence[LaneCursor]
    """Positions of the lanes after this iteration, for the slots it had."""
    differing_stages: tuple[int, ...] = ()
    """Stages where the replica check found copies that differ."""
    num_saved: int = 0
    """Number of ranks whose part of the current save is on disk."""
    num_not_saved: int = 0
    """Number of ranks that can't write theirs."""
    num_masked_tokens: int = 0
    """Those without a loss."""
    evaluate: bool = False
    """An evaluation is due by the leader's clock, and follows this iteration."""
    param_norm: float | None = None
    """l2 norm of all weights before the update; None where it was not measured, as the next two."""
    variance_norm: float | None = None
    """l1 norm of Adam's sqrt(v) before the update."""
    variance_max: float | None = None
    """Largest element of sqrt(v) before the update."""
    unit_times: tuple[UnitTime, ...] = field(default=(), compare=False)
    """With `elastic.balance`, the time of each replica. Entries of the same mathematics are equal whatever it took."""

    @property
    def num_loss_tokens(self) -> int:
        """The tokens that sums are divided by; 1 in a step that has none."""
        return max(1, self.num_target_tokens - self.num_masked_tokens)

    @property
    def loss(self) -> float:
        """Mean loss of a target token, in nats."""
        return self.loss_sum / self.num_loss_tokens

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient of the mean loss, before clipping."""
        return sqrt(self.squared_norm) / self.num_loss_tokens

    @property
    def metrics(self) -> StepMetrics:
        """The figures that the monitors follow."""
        return StepMetrics(
            loss=self.loss,
            grad_norm=self.grad_norm if self.finite else None,
            param_norm=self.param_norm,
            variance_norm=self.variance_norm,
            variance_max=self.variance_max,
        )

    def grad_scale(self, max_grad_norm: float | None) -> float:
        """The factor that turns a sum of token gradients into the clipped gradient of the mean loss."""
        scale = 1.0 / self.num_loss_tokens
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
        unit_times = tuple((stage, worker, time) for stage, worker, time in data.get("unit_times", ()))
        differing = tuple(data["differing_stages"])
        return Entry(**{**fields, "cursors": cursors, "differing_stages": differing, "unit_times": unit_times})


@dataclass(frozen=True, kw_only=True)
class EvaluationEntry:
    """The result of the evaluation after iteration `iteration`, the same on all ranks."""

    iteration: int
    loss: float | None
    """Mean loss of a token of the validation text, in nats; None without such a text."""

    def to_json(self) -> Json:
        return {"kind": "evaluation", "iteration": self.iteration, "loss": self.loss}

    @staticmethod
    def from_json(data: Json) -> EvaluationEntry:
        return EvaluationEntry(iteration=data["iteration"], loss=data["loss"])


def entry_from_json(data: Json) -> Entry | EvaluationEntry:
    """The entry of either kind that `to_json` encoded."""
    return EvaluationEntry.from_json(data) if data["kind"] == "evaluation" else Entry.from_json(data)
