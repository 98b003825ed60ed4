"""The common knowledge of all workers of a run: the coming step, and the entry of the last one. Pure.

An entry is the result of the all-reduce that ends a step. A worker contributes to it only when it holds the sum of all
gradients, so one that holds entry k proves that every worker can complete step k.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallel3d.elastic.drop_in.sample_order import SampleOrder, SampleState
from parallel3d.errors import ProtocolError
from parallel3d.precision.fixed_point import ExactSum

FLAGS = ("num_workers", "num_samples", "leave", "stop")


@dataclass(frozen=True, kw_only=True)
class StepEntry:
    """A committed step, or one worker's contribution to it."""

    step: int
    epoch: int = 0
    num_workers: int = 1
    num_samples: int = 0
    leave: int = 0
    """Workers that ask for a change of membership after this step."""
    stop: int = 0
    """Workers that ask for the end of the run after this step."""
    loss: ExactSum = ExactSum()
    """Sum of what the loop has reported with `Step.add_loss`."""

    def to_floats(self) -> list[float]:
        return [*(float(getattr(self, name)) for name in FLAGS), *self.loss.to_floats()]

    @staticmethod
    def from_floats(step: int, epoch: int, floats: Sequence[float]) -> StepEntry:
        flags = {name: int(value) for name, value in zip(FLAGS, floats)}
        return StepEntry(step=step, epoch=epoch, loss=ExactSum.from_floats(floats[len(FLAGS) :]), **flags)

    def encode(self) -> bytes:
        return json.dumps({**vars(self), "loss": [str(self.loss.units), self.loss.rest]}).encode()

    @staticmethod
    def decode(data: bytes) -> StepEntry:
        fields = json.loads(data)
        units, rest = fields.pop("loss")
        return StepEntry(**fields, loss=ExactSum(units=int(units), rest=rest))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a run."""

    samples: SampleState
    newest: StepEntry | None = None
    is_over: bool = False
    """The loop has ended; only what follows it in the script is left."""

    @property
    def position(self) -> int:
        """The number of the last committed step."""
        return self.samples.step - 1

    def apply(self, entry: StepEntry, order: SampleOrder, workers: Sequence[int]) -> Progress:
        """Returns the progress after `entry`, committed by `workers`; the same if it is applied already."""
        if entry.step <= self.position:
            return self
        num_used = order.num_used(self.samples)
        if (entry.step, entry.num_samples) != (self.samples.step, num_used):
            raise ProtocolError(f"step {self.samples.step} has {num_used} samples, its entry says {entry}")
        return replace(self, samples=order.advance(self.samples, workers), newest=entry)

    def to_json(self) -> dict[str, Any]:
        newest = self.newest.encode().decode() if self.newest else ""
        return {"samples": self.samples.to_json(), "newest": newest, "is_over": self.is_over}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Progress:
        newest = StepEntry.decode(data["newest"].encode()) if data["newest"] else None
        return Progress(samples=SampleState.from_json(data["samples"]), newest=newest, is_over=data["is_over"])
