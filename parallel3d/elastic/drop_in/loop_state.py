"""What one worker of a training loop holds, and what it brings into a generation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from parallel3d.elastic.drop_in.gradient_sums import GradientSums
from parallel3d.elastic.drop_in.progress import Progress, StepEntry
from parallel3d.elastic.drop_in.sample_order import SampleOrder
from parallel3d.elastic.drop_in.state_tree import decode_tree, encode_tree
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.errors import UserError

LossKind = Literal["mean", "sum"]


class Stateful(Protocol):
    """A model, an optimizer, a schedule of learning rates ..."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(kw_only=True)
class LoopState:
    """The state of the loop. At most one step lies between the weights and the newest entry: it is settled, and its
    gradients wait for the optimizer."""

    gradients: GradientSums | None = None
    stateful: Sequence[Stateful] = ()
    loss: LossKind = "mean"
    order: SampleOrder | None = None
    progress: Progress | None = None
    """None before the run's first generation."""
    weights_step: int = 0
    """The step whose update the weights have."""
    workers: tuple[int, ...] = ()
    """Of the last committed generation."""

    @property
    def position(self) -> int:
        return 0 if self.progress is None else self.progress.position

    @property
    def is_settled(self) -> bool:
        return self.position > self.weights_step

    def encode_newest(self) -> bytes:
        return self.progress.newest.encode() if self.progress and self.progress.newest else b""

    def apply_entry(self, data: bytes) -> None:
        self.apply(StepEntry.decode(data))

    def apply(self, entry: StepEntry) -> None:
        """Completes a step: every worker has contributed to its entry, so this one holds all gradients."""
        assert self.progress is not None and self.order is not None
        if entry.step > self.position:
            self.progress = self.progress.apply(entry, self.order, self.workers)
            if self.gradients is not None:
                self.gradients.publish()

    def encode_state(self) -> Tensor:
        waiting = self.gradients.gradients() if self.is_settled and self.gradients else []
        progress = None if self.progress is None else self.progress.to_json()
        return encode_tree(
            {
                "progress": json.dumps(progress),
                "weights_step": self.weights_step,
                "num_threads": torch.get_num_threads(),
                "gradients": waiting,
                "state": [each.state_dict() for each in self.stateful],
            }
        )

    def load_state(self, words: Tensor) -> None:
        """Takes another worker's state."""
        tree = decode_tree(words)
        if len(tree["state"]) != len(self.stateful):
            raise UserError("the workers' scripts differ: not as many objects with a state")
        for each, state in zip(self.stateful, tree["state"]):
            each.load_state_dict(state)
        torch.set_num_threads(tree["num_threads"])  # the bits of sums depend on it
        progress = json.loads(tree["progress"])
        self.progress = None if progress is None else Progress.from_json(progress)
        self.weights_step = tree["weights_step"]
        if self.gradients is not None and tree["gradients"]:
            self.gradients.load_gradients(tree["gradients"])

    def begin_generation(self, record: GenerationRecord, *, is_proposed: bool) -> str:
        """Gives the coming step to the workers of `record`, for good unless it is only proposed; returns a digest of
        it, the same on all workers."""
        order, workers = self.order or SampleOrder(num_samples=1, slot_size=1), record.grid.ranks
        if self.progress is None:
            progress = Progress(samples=order.begin(workers))
        else:
            samples = order.change_workers(self.progress.samples, workers)
            progress = replace(self.progress, samples=samples)
        if not is_proposed:
            self.order, self.progress, self.workers = order, progress, workers
        compared = replace(progress, is_over=False)  # some may be at the end of their scripts, others in the last step
        return hashlib.sha256(json.dumps([compared.to_json(), str(order)]).encode()).hexdigest()[:16]
