"""The batch of one iteration, and what layers are told of the micro-batch they work on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Site = Literal["forward", "backward"]
"""The pass that gives a gradient: the head's comes in the forward pass."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive tokens of one sequence, as far as a rank has them."""

    slot: int
    positions: range
    """Where they stand in the sequence."""
    rows: slice
    """Where they stand among the rank's tokens."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """`slots` are the sequence slots of the iteration whose sequences lie end to end in this micro-batch."""

    seed: int
    iteration: int
    slots: tuple[int, ...]
    sequence_length: int
    training: bool = True
    loss_factor: float = 1.0
    """Multiplies the gradients where they begin."""

    @property
    def batch_size(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.slots) * self.sequence_length

    def pieces(self, begin: int, num_local: int) -> Iterator[Piece]:
        """Tokens `begin` to `begin + num_local - 1` of the micro-batch, sequence by sequence."""
        seq = self.sequence_length
        for number, slot in enumerate(self.slots):
            first, last = max(begin, number * seq), min(begin + num_local, (number + 1) * seq)
            if first < last:
                positions = range(first - number * seq, last - number * seq)
                yield Piece(slot=slot, positions=positions, rows=slice(first - begin, last - begin))


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batch of one iteration: which sequence slots make up micro-batch m. Nothing here knows of ranks."""

    seed: int
    iteration: int
    num_micro_batches: int
    micro_batch_size: int
    sequence_length: int
    training: bool = True
    loss_factor: float = 1.0
    """Multiplies the gradients where they begin; the optimizer divides by it again."""

    @property
    def num_slots(self) -> int:
        return self.num_micro_batches * self.micro_batch_size

    @property
    def num_tokens(self) -> int:
        return self.num_slots * self.sequence_length

    def slots(self, micro_batch: int) -> tuple[int, ...]:
        first = micro_batch * self.micro_batch_size
        return tuple(range(first, first + self.micro_batch_size))

    def micro_batch(self, number: int) -> MicroBatch:
        return MicroBatch(
            seed=self.seed,
            iteration=self.iteration,
            slots=self.slots(number),
            sequence_length=self.sequence_length,
            training=self.training,
            loss_factor=self.loss_factor,
        )
